"""Writes down each address that a Python process connects to, or looks up.

A copy of this file named sitecustomize.py on PYTHONPATH is imported by every Python process of an
engine; `CONNECTION_LOG` names the file.
"""

import os
import sys
from socket import SOCK_DGRAM

FILE = "CONNECTION_LOG"
_EVENTS = ("socket.connect", "socket.getaddrinfo", "socket.sendto")


def record(event: str, arguments: tuple[object, ...]) -> None:
    # A datagram socket that is connected sends nothing: vLLM asks the kernel for a route so.
    is_route = event == "socket.connect" and getattr(arguments[0], "type", 0) == SOCK_DGRAM
    if event in _EVENTS and not is_route:
        address = arguments[0] if event == "socket.getaddrinfo" else arguments[1]
        host = address[0] if isinstance(address, tuple) else address
        with open(os.environ[FILE], "a") as file:
            file.write(f"{event} {host!r}\n")


if FILE in os.environ:
    sys.addaudithook(record)
