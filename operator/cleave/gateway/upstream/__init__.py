"""The gateway's side of engines: connections, failure detection, handoffs, starts of streams."""
