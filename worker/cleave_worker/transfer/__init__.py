"""Moves KV blocks between engines: registered memory, links, and what makes a hand-off trusted."""
