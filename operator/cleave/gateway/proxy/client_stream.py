"""The client side of a proxied request: a client's connection, or a stand-in in tests."""

from typing import Protocol


class ClientStream(Protocol):
    """Takes the response."""

    chunked: bool
    """Whether it understands chunked bodies (HTTP/1.1)."""
    keep_alive: bool
    """Whether it may send another request over its connection."""
    blocked: bool
    """Whether it takes bytes more slowly than they come."""

    def write(self, data: bytes) -> None:
        """Send bytes of the response."""

    def end(self, reusable: bool) -> None:
        """The response is complete; `reusable` False: close the connection after it."""

    def drop(self) -> None:
        """Close the connection at once."""
