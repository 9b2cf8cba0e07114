"""The traffic to plan for: recorded, published or specified, and random samples of it."""
