"""A fast HTTP/1.1 exchange that records when each server-sent event arrives.

Used by the client, which measures streams with it. What is hard: a client that spends 0.2 ms per
token would itself be the bottleneck at 100 streams, so this module neither parses JSON nor wakes a
task per token. Connections are not reused.
"""

import asyncio
from collections.abc import Callable

OnEvents = Callable[[float, int], None]
"""Called with the arrival time, in seconds of the loop's clock, and the number of events."""

_HEAD_END = b"\r\n\r\n"
_EVENT_END = b"\n\n"
_MAX_HEAD_BYTES = 65536


class HttpResponseError(ConnectionError):
    """The response is not HTTP, or the connection ended before the response."""


class ChunkDecoder:
    """Removes the chunk sizes of `Transfer-Encoding: chunked` from a body received in parts."""

    __slots__ = ("_pending", "_remaining", "ended")

    def __init__(self) -> None:
        self.ended = False
        self._pending = b""
        self._remaining = 0
        """Bytes of the current chunk and its line end that have not arrived."""

    def feed(self, data: bytes) -> bytes:
        """The body's bytes in `data`. Raises HttpResponseError on a malformed chunk."""
        data = self._pending + data
        self._pending = b""
        parts = []
        at = 0
        while at < len(data) and not self.ended:
            if self._remaining:
                part = data[at : at + self._remaining]
                # The last two bytes of a chunk are its line end.
                parts.append(part[: max(0, self._remaining - 2)])
                self._remaining -= len(part)
                at += len(part)
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                self._pending = data[at:]
                break
            size = _parse_size(data[at:end])
            at = end + 2
            self.ended = size == 0
            self._remaining = size + 2
        return b"".join(parts)


class TimedHttpExchange(asyncio.Protocol):
    """Sends one request, collects its response and records when each server-sent event arrives."""

    def __init__(self, request: bytes, on_events: OnEvents | None = None) -> None:
        self.status = 0
        self.body = bytearray()
        self.sent_s = 0.0
        self.event_s: list[float] = []
        """Time of the loop's clock at the end of each event of the body."""
        loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = loop.create_future()
        self._request = request
        self._on_events = on_events
        self._clock = loop.time
        self._head = b""
        self._chunks: ChunkDecoder | None = None
        self._content_length = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        assert isinstance(transport, asyncio.Transport)
        self.sent_s = self._clock()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Parse a part of the response."""
        now = self._clock()
        try:
            if not self.status:
                self._head += data
                data = self._parse_head()
            if self.status and not self.done.done():
                self._add_body(data, now)
        except HttpResponseError as error:
            self._finish(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection was closed by either side."""
        is_complete = self.status and not self._chunks and self._content_length < 0
        reason = str(exc or "the connection ended early")
        self._finish(None if is_complete else HttpResponseError(reason))

    def _parse_head(self) -> bytes:
        head, separator, rest = self._head.partition(_HEAD_END)
        if not separator:
            if len(self._head) > _MAX_HEAD_BYTES:
                raise HttpResponseError("the answer has no HTTP head")
            return b""
        first, *fields = head.split(b"\r\n")
        words = first.split()
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
            raise HttpResponseError("the answer is no HTTP/1.1")
        for field in fields:
            name, _, value = field.lower().partition(b":")
            if name == b"transfer-encoding" and value.strip() == b"chunked":
                self._chunks = ChunkDecoder()
            elif name == b"content-length" and value.strip().isdigit():
                self._content_length = int(value)
        self.status = int(words[1])
        return rest

    def _add_body(self, data: bytes, now: float) -> None:
        if self._chunks:
            data = self._chunks.feed(data)
        # The end of an event may be split over two parts.
        cut = int(self.body[-1:] == b"\n" and data[:1] == b"\n")
        events = data[cut:].count(_EVENT_END) + cut
        self.body += data
        if events:
            self.event_s += [now] * events
            if self._on_events:
                self._on_events(now, events)
        if self._chunks.ended if self._chunks else len(self.body) == self._content_length:
            self._finish(None)

    def _finish(self, error: Exception | None) -> None:
        if self.done.done():
            return
        if error:
            self.done.set_exception(error)
        else:
            self.done.set_result(None)


def _parse_size(line: bytes) -> int:
    try:
        return int(line.partition(b";")[0], 16)
    except ValueError:
        raise HttpResponseError("the answer's chunks are malformed") from None
