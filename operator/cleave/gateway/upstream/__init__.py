"""The gateway's side of engines: connections, failure detection, handoffs, the start of
streams."""
