"""Where an exchange's answer goes; a client's connection, or a stand-in of tests."""

from typing import Protocol


class Client(Protocol):
    """Where the answer goes."""

    chunked: bool
    """Whether it understands chunked bodies (HTTP/1.1)."""
    keep_alive: bool
    """Whether it may send another request over its connection."""
    blocked: bool
    """Whether it takes bytes more slowly than they come."""

    def write(self, data: bytes) -> None:
        """Send bytes of the response."""

    def end(self, reusable: bool) -> None:
        """The response is complete; not reusable: close the connection after it."""

    def drop(self) -> None:
        """Close the connection at once."""
