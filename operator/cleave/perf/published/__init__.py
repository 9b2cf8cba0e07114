"""Latency models and profiles that papers published."""
