"""Tests that share one pair of vLLM engines."""
