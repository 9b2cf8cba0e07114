"""Measured latency profiles: files, fits and tables."""
