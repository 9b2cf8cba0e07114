"""Engines as the gateway meets them: connections, their health, hand-offs, how streams begin."""
