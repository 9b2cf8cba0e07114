"""The client side of a proxied request: a connection, a translation before it, or a test."""

from collections.abc import Sequence
from typing import Protocol


class ClientStream(Protocol):
    """Takes the response."""

    chunked: bool
    """Whether it understands chunked bodies (HTTP/1.1)."""

    @property
    def keep_alive(self) -> bool:
        """Whether it may send another request over its connection."""

    @property
    def blocked(self) -> bool:
        """Whether it takes bytes more slowly than they come."""

    def write(self, data: bytes | memoryview) -> None:
        """Send bytes of the response. Raises GatewayError, if they cannot be sent in the client's
        API, in which the response has then ended with an error."""

    def write_pieces(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Send many bytes of the response, as the client takes them."""

    def end(self, reusable: bool) -> None:
        """The response is complete; `reusable` False: close the connection after it."""

    def drop(self) -> None:
        """Close the connection at once."""
