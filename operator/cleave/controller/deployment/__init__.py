"""Deployment."""
