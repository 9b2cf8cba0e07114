"""Scaling law."""
