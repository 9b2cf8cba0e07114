"""Latency, memory, GPU and model descriptions."""
