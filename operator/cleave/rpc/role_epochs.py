"""Bounds of the epoch of a role, which grows by one with every SetRole. Used by both sides of it.

A SetRole request must have a newer epoch than the agent. A request with the largest epoch would
block all later ones, so the step is bounded.
"""

MAX_EPOCH_STEP = 1 << 20
"""Largest difference from the agent's epoch: far more than the number of concurrent requests."""
MAX_EPOCH = (1 << 64) - 1
"""Largest value of the field; an agent with it cannot change its role until it restarts."""
