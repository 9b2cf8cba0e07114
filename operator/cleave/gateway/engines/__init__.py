"""The gateway's side of engines: connections, failure detection, hand-offs, the start of
streams."""
