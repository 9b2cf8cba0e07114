"""Replanning: compares traffic and latencies with the plan, and replans when they differ."""
