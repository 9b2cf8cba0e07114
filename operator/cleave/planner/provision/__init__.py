"""Provision."""
