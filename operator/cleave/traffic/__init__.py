"""The traffic to plan for: recorded, published or stated, and what draws requests from it."""
