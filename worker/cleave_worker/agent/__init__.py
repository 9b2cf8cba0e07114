"""The sidecar process of every engine: starts, verifies and drains it, and reports its load."""
