"""Ports for servers that a test starts a moment later."""

import random
import socket

_PORTS = range(12_000, 22_000)
"""Below those that the kernel gives to connections (`ip_local_port_range`, from 32,768 on), which
may take a port between this look and the server's start; so are a gateway's internal ports, 10,000
above."""


def find_free_port() -> int:
    """A port of 127.0.0.1 on which nothing listens now."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as sock:
            # As servers do: connections that are ending do not count.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
