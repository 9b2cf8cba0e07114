"""Transfers KV blocks between engines: registered memory, links, leases and verified handoffs."""
