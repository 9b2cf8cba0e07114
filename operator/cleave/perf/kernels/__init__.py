"""Iteration times from published measurements of vLLM's kernels, by GPU."""
