"""Latencies from the model's operators and the GPU's peak rates."""
