"""Transports."""
