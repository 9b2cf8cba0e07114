"""Writes down each address that a Python process connects to, or looks up.

A copy of this file named sitecustomize.py on PYTHONPATH is imported by every Python process of an
engine; `CONNECTION_LOG` names the file.
"""

import os
import sys

FILE = "CONNECTION_LOG"
_EVENTS = ("socket.connect", "socket.getaddrinfo", "socket.sendto")


def record(event: str, arguments: tuple[object, ...]) -> None:
    if event in _EVENTS:
        address = arguments[0] if event == "socket.getaddrinfo" else arguments[1]
        host = address[0] if isinstance(address, tuple) else address
        with open(os.environ[FILE], "a") as file:
            file.write(f"{event} {host!r}\n")


if FILE in os.environ:
    sys.addaudithook(record)
