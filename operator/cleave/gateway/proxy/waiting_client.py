"""The client of a stream that has waited so long that its head was sent before an engine answered.

Made by a proxied request in place of its client. Load balancers end connections on which nothing
comes for a minute, though a long prompt or a queue may take longer; so the client gets a head, and
comments, which clients of event streams skip. What is hard: with the head the status is sent, so
what the proxied request responds with afterwards, such as an error, becomes an event.
"""

from collections.abc import Sequence
from http import HTTPStatus

from cleave.gateway.http import headers
from cleave.gateway.http.headers import LAST_CHUNK, encode_chunk
from cleave.gateway.proxy.client_stream import ClientStream

WAIT_S, SILENCE_S = 13.0, 29.0
"""After which a client of a stream gets a comment: before the answer begins, and within it."""
_COMMENT = b": keep-alive\n\n"
_HEAD_END = b"\r\n\r\n"
_LENGTH = b"\r\ncontent-length: "


class WaitingClient:
    """Takes the response to a stream whose head was sent."""

    def __init__(self, client: ClientStream, request_id: bytes) -> None:
        """Sends the head."""
        self.client = client
        """The one that waits."""
        self.chunked = client.chunked
        self._has_begun = False
        """Whether the engine's or the gateway's own response has begun."""
        self._body: list[bytes | memoryview] | None = None
        """Of a response that is no stream; None: it is one, or has not begun."""
        fields = headers.STREAM_CONTENT
        if not client.keep_alive:
            fields += headers.CONNECTION_CLOSE
        code = HTTPStatus.OK.value
        client.write(headers.build_stream_head(code, fields, request_id, self.chunked))

    @property
    def keep_alive(self) -> bool:
        """Whether the client may send another request over its connection."""
        return self.client.keep_alive

    @property
    def blocked(self) -> bool:
        """Whether the client takes bytes more slowly than they come."""
        return self.client.blocked

    def write(self, data: bytes | memoryview) -> None:
        """Take bytes of the response, first its head, which is left out."""
        if not self._has_begun:
            self._has_begun = True
            head, _, data = bytes(data).partition(_HEAD_END)
            if _LENGTH in head:
                self._body = []
        if self._body is not None:
            self._body.append(data)
        elif data:
            self.client.write(data)

    def write_pieces(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Take many bytes of the response."""
        for piece in pieces:
            self.write(piece)

    def end(self, reusable: bool) -> None:
        """The response is complete."""
        if self._body is not None:
            # Outside of texts JSON may have line ends, which would end the event.
            body = b"".join(self._body).replace(b"\n", b" ")
            event = b"data: %b\n\n" % body
            self.client.write(encode_chunk(event) + LAST_CHUNK if self.chunked else event)
        self.client.end(reusable)

    def drop(self) -> None:
        """Close the connection at once."""
        self.client.drop()


def send_comment(client: ClientStream, request_id: bytes, has_begun: bool) -> ClientStream:
    """Send a comment between two events of a stream; returns what takes the rest of it.
    `has_begun`: whether a head of the engine's response was sent."""
    waiting = client
    if not has_begun and not isinstance(client, WaitingClient):
        waiting = WaitingClient(client, request_id)
    receiver = waiting.client if isinstance(waiting, WaitingClient) else client
    receiver.write(encode_chunk(_COMMENT) if receiver.chunked else _COMMENT)
    return waiting
