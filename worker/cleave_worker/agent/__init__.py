"""The process beside every engine: starts it, verifies it, reports its load, drains it."""
