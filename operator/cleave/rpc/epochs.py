"""Bounds of the epoch of a role, which grows by one with every order. Used by both ends of SetRole.

An order must be newer than the agent's own epoch. One order with the last number there is would
keep the agent from every later one, so the step is bounded.
"""

MAX_STEP = 1 << 20
"""By so many an order may exceed the agent's epoch: far more than orders that cross."""
LAST = (1 << 64) - 1
"""What the message holds; an agent that has it can be given no other role before it restarts."""
