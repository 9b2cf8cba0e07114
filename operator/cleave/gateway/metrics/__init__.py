"""Metrics of a gateway, and their sum over its processes."""
