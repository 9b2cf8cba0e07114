"""A client's connection: reads requests, one at a time, and writes responses.

Made by the event loop for each connection. What is hard: HTTP/1.1 lets a client send its next
request before the answer to the last; what has arrived is kept, and no more is read, until its turn
comes. Reading goes on while an engine works as long as nothing comes, for only reading tells that
the client has gone.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol, cast

import httptools

from cleave.gateway import head
from cleave.gateway.context import Context
from cleave.gateway.engine import set_nodelay
from cleave.gateway.errors import ApiError, refuse

MAX_HEAD_BYTES = 64 << 10
LINGER_S = 5.0
"""How long what a refused client still sends is thrown away, so that it reads the refusal."""
WRITE_BUFFER_BYTES = 256 << 10

_READ = frozenset(
    (b"authorization", b"content-length", b"expect", b"transfer-encoding", b"x-request-id")
)
_LENGTHS = frozenset(map(len, _READ))

_TOO_LONG_HEAD = ApiError(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    f"the request's head is longer than {MAX_HEAD_BYTES} bytes",
    "invalid_request_error",
)


@dataclass(slots=True)
class Request:
    """One request, read completely."""

    method: bytes
    path: bytes
    headers: dict[bytes, bytes]
    http11: bool
    keep_alive: bool
    body: bytes = b""


class Running(Protocol):
    """What works on a request."""

    def cancel(self) -> None:
        """The client is gone."""

    def hold(self, blocked: bool) -> None:
        """The client takes no more, or takes bytes again."""


class Handler(Protocol):
    """What requests are given to."""

    def check(self, request: Request) -> ApiError | None:
        """Look at a request whose body is still to come; an error refuses it unread."""

    def handle(self, client: "ClientConnection", request: Request) -> None:
        """Answer a request, now or later, through the client's methods."""


class ClientConnection(asyncio.Protocol):
    """One client."""

    transport: asyncio.Transport

    def __init__(self, context: Context, handler: Handler) -> None:
        self._context = context
        self._handler = handler
        self._body_limit = context.config.max_body_bytes
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0
        self._unfinished_bytes = 0
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._raw_body_left = 0
        self._request: Request | None = None
        self._ready: deque[Request] = deque()
        self._backlog: list[bytes] = []
        self._refusal: ApiError | None = None
        self._deaf = False
        self._busy = False
        self._running: Running | None = None
        self.keep_alive = True
        self.chunked = True
        self.blocked = False
        self._deadline = 0.0

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set up by the event loop."""
        self.transport = cast("asyncio.Transport", transport)
        set_nodelay(self.transport)
        self.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._wait(self._context.config.timeouts.keep_alive_s)
        self._context.clients.add(self)
        if len(self._context.clients) > self._context.config.max_clients:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse, or keep for later while a request is being answered."""
        if self._deaf:
            return
        if self._busy:
            self._backlog.append(data)
            self.transport.pause_reading()
            return
        self._feed(data)

    def eof_received(self) -> None:
        """A client that has closed its sending side counts as gone."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Closed by either side."""
        del exc
        self._context.clients.discard(self)
        self._parser = None
        self._ready.clear()
        running, self._running = self._running, None
        if running is not None:
            running.cancel()

    def pause_writing(self) -> None:
        """The client does not keep up."""
        self.blocked = True
        if self._running is not None:
            self._running.hold(True)

    def resume_writing(self) -> None:
        """The client has caught up."""
        self.blocked = False
        if self._running is not None:
            self._running.hold(False)

    # --- httptools ---

    def on_url(self, url: bytes) -> None:
        """The request target, perhaps in pieces."""
        self._url += url
        self._head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header line, or a trailer."""
        self._head_bytes += len(name) + len(value)
        if len(name) in _LENGTHS and self._request is None:
            name = name.lower()
            if name in _READ:
                self._headers[name] = value

    def on_headers_complete(self) -> None:
        """The head is whole: refuse the request before its body comes, or ask for the body."""
        parser = self._parser
        assert parser is not None
        request = Request(
            method=parser.get_method(),
            path=self._url.partition(b"?")[0],
            headers=self._headers,
            http11=parser.get_http_version() == "1.1",
            keep_alive=parser.should_keep_alive(),
        )
        self._request = request
        self._url, self._headers, self._unfinished_bytes = b"", {}, 0
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refusal = _TOO_LONG_HEAD
        elif int(request.headers.get(b"content-length", b"0")) > self._body_limit:
            self._refusal = self._explain_size()
        elif parser.should_upgrade():
            self._expect_raw_body(request)
        elif b"expect" in request.headers:
            self._expect(request)

    def on_body(self, piece: bytes) -> None:
        """A piece of the body, its chunk framing already taken off."""
        self._body_bytes += len(piece)
        if self._refusal is not None:
            return
        if self._body_bytes <= self._body_limit:
            self._body.append(piece)
        else:
            self._body.clear()
            self._refusal = self._explain_size()

    def on_message_complete(self) -> None:
        """A request is whole; its turn may come later."""
        if self._raw_body_left:
            return
        request, self._request = self._request, None
        assert request is not None
        request.body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        self._body_bytes = self._head_bytes = 0
        if self._refusal is None:
            self._ready.append(request)

    # --- what handlers call ---

    def run(self, running: Running) -> None:
        """Say what works on the present request, so that it hears of the client."""
        self._running = running

    def write(self, data: bytes) -> None:
        """Send bytes of the response."""
        self.transport.write(data)

    def end(self, reusable: bool) -> None:
        """The response is complete; not reusable: close the connection after it."""
        self._running = None
        if not reusable or not self.keep_alive or self._context.draining:
            self._wait(self._context.config.timeouts.idle_s)
            self.transport.close()
            return
        self._busy = False
        self._wait(self._context.config.timeouts.keep_alive_s)
        if self._ready or self._backlog or self._refusal is not None:
            asyncio.get_running_loop().call_soon(self._go_on)

    def drop(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def respond(self, status: int, fields: bytes, body: bytes, request_id: bytes) -> None:
        """A whole response."""
        reusable = self.keep_alive and not self._context.draining
        if not reusable:
            fields += head.CLOSE
        self.write(head.build_head(status, fields, request_id, len(body)) + body)
        self.end(reusable)

    def sweep(self, now: float) -> None:
        """Keep the deadline of an idle, sending or closing client."""
        if (self._busy and not self.transport.is_closing()) or now <= self._deadline:
            return
        self.transport.abort()

    def close_if_idle(self) -> None:
        """The gateway ends: nothing is lost by closing this one."""
        if not self._busy:
            self.transport.close()

    # --- reading ---

    def _feed(self, data: bytes) -> None:
        parser = self._parser
        if parser is None:
            return
        rest = data
        try:
            while rest and self._refusal is None:
                if self._raw_body_left:
                    rest = self._take_raw_body(rest)
                    continue
                try:
                    parser.feed_data(rest)
                    rest = b""
                except httptools.HttpParserUpgrade as upgrade:
                    rest = rest[upgrade.args[0] :]
        except httptools.HttpParserCallbackError:
            raise
        except httptools.HttpParserError:
            self._refusal = refuse("the request is not valid HTTP")
        if self._ready:
            self._next()
            return
        if self._request is None:
            self._unfinished_bytes += len(data)
            if self._unfinished_bytes > MAX_HEAD_BYTES:
                self._refusal = self._refusal or _TOO_LONG_HEAD
        if self._refusal is not None:
            self._refuse(self._refusal)
        else:
            self._wait(self._context.config.timeouts.idle_s)

    def _go_on(self) -> None:
        """Turn to what arrived while the last request was being answered."""
        if self._busy or self._parser is None or self.transport.is_closing():
            return
        if self._ready:
            self._next()
        elif self._refusal is not None:
            self._refuse(self._refusal)
        else:
            backlog = b"".join(self._backlog)
            self._backlog.clear()
            self.transport.resume_reading()
            self._feed(backlog)

    def _next(self) -> None:
        request = self._ready.popleft()
        self._busy = True
        self.keep_alive = request.keep_alive and request.http11
        self.chunked = request.http11
        self._handler.handle(self, request)

    def _expect_raw_body(self, request: Request) -> None:
        """An offer to upgrade (JDK's HttpClient makes it) is ignored and the request served.

        The parser takes what follows such a head for another protocol: the body is read here.
        """
        if b"transfer-encoding" in request.headers:
            self._refusal = refuse("an offer to upgrade cannot come with a chunked body")
        self._raw_body_left = int(request.headers.get(b"content-length", b"0"))

    def _take_raw_body(self, data: bytes) -> bytes:
        piece, rest = data[: self._raw_body_left], data[self._raw_body_left :]
        self._raw_body_left -= len(piece)
        self.on_body(piece)
        if not self._raw_body_left:
            self.on_message_complete()
        return rest

    def _expect(self, request: Request) -> None:
        if request.headers[b"expect"].lower() != b"100-continue":
            self._refusal = ApiError(
                HTTPStatus.EXPECTATION_FAILED, "unknown expectation", "invalid_request_error"
            )
            return
        self._refusal = self._handler.check(request)
        if self._refusal is None and not self._ready:
            self.write(head.CONTINUE)

    def _refuse(self, error: ApiError) -> None:
        """Answer without reading on, then listen no more and close."""
        self._deaf = True
        body = error.to_json()
        request_id = self._context.make_id()
        fields = head.JSON + head.CLOSE
        self.write(head.build_head(error.status, fields, request_id, len(body)) + body)
        self._context.metrics.requests["", "refused"] += 1
        self.transport.write_eof()
        self.transport.resume_reading()
        self._wait(LINGER_S)

    def _explain_size(self) -> ApiError:
        limit = self._body_limit
        return ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body is larger than {limit} bytes",
            "invalid_request_error",
            code="body_too_large",
        )

    def _wait(self, seconds: float) -> None:
        self._deadline = self._context.clock() + seconds
