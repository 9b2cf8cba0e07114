"""A client's connection: takes requests, one at a time, and writes responses.

Made by the event loop for each connection. What is hard: HTTP/1.1 lets a client send its next
request before the answer to the last; what has arrived is kept, and no more is read, until its turn
comes. It comes when the last answer is complete and the client takes it. Reading goes on while an
engine works as long as nothing comes, for only reading tells that the client has gone.
"""

import asyncio
import math
from http import HTTPStatus
from typing import Protocol, cast

from cleave.gateway.context import Context
from cleave.gateway.http import headers
from cleave.gateway.http.completion_request import BodyScan
from cleave.gateway.http.connection_limiter import Connections
from cleave.gateway.http.errors import ApiError, build_error_fields
from cleave.gateway.http.large_json import MIN_BYTES
from cleave.gateway.http.request_parser import Request, RequestReader
from cleave.gateway.upstream.connection_pool import set_nodelay

LINGER_S = 5.0
"""How long what a refused client still sends is thrown away, so that it reads the refusal."""
DISCARD_BYTES = 1 << 20
"""Of it, of all refused clients, between two rounds of the sweeper."""
DISCARD_PAUSE_S = 0.1
WRITE_BUFFER_BYTES = 256 << 10
JOINED_BYTES = 16 << 10
"""A longer body is sent as it is, for a page that is kept goes to many clients at once."""
FEED_BYTES = 16 << 10
"""Read at once: of what one read brings, more pipelined requests than fit in it are not made."""
LARGE_BODY_BYTES = 256 << 10
LARGE_BODY_SHARE = 1 / 8
"""Of the event loop's time that larger bodies get: each holds it while its JSON is read."""
LEAST_BODY_RATE = 64 << 10
"""Bytes a second: a body may take the idle time-out, and what it takes at this rate."""

_TOO_SLOW = ApiError(
    HTTPStatus.REQUEST_TIMEOUT,
    "the request did not come in time",
    "invalid_request_error",
    code="request_timeout",
)
_FULL = ApiError(
    HTTPStatus.SERVICE_UNAVAILABLE,
    "too many large requests are being received at once: send it again",
    "server_error",
    code="receiving_too_much",
    retry_after_s=1,
)


class Running(Protocol):
    """What works on a request."""

    def cancel(self) -> None:
        """The client is gone."""

    def hold(self, blocked: bool) -> None:
        """The client takes no more, or takes bytes again."""


class Handler(Protocol):
    """What requests are given to."""

    def check(self, request: Request) -> ApiError | None:
        """Look at the head of a request whose body is still to come; an error refuses it."""

    def handle(self, client: "ClientConnection", request: Request) -> None:
        """Answer a request, now or later, through the client's methods."""

    def note(self, request_id: bytes, status: int, request: Request | None = None) -> None:
        """A request has been answered without an engine; None: it is not even one."""


class ClientConnection(asyncio.Protocol):
    """One client."""

    transport: asyncio.Transport

    def __init__(self, context: Context, handler: Handler, port: Connections) -> None:
        """`port`: where it counts."""
        self._context = context
        self._port = port
        self._outbox = context.outbox
        self._handler = handler
        self._reader = RequestReader(
            context.config.max_body_bytes, handler.check, context.also_read
        )
        self._backlog: list[bytes] = []
        self._deaf = False
        self._busy = False
        self._receiving = False
        self._running: Running | None = None
        self._deadline = 0.0
        self._idle_since = 0.0
        self._begun_at = 0.0
        """When the request began that is not whole."""
        self._kept_bytes = 0
        """Its part of the context's partial_bytes."""
        self._waiting_bytes = 0
        """Of a large body that is whole and waits for its turn."""
        self.keep_alive = True
        """Whether it may send another request over this connection."""
        self.chunked = True
        """Whether it understands chunked bodies (HTTP/1.1)."""
        self.blocked = False
        """Whether it takes bytes more slowly than they come."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set up by the event loop."""
        self.transport = cast("asyncio.Transport", transport)
        set_nodelay(self.transport)
        self.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._rest()
        self._context.clients.add(self)
        if not self._port.admit(self, transport.get_extra_info("peername")):
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read, or keep for later while a request is answered or the client takes nothing."""
        if self._deaf:
            self._discard(len(data))
            return
        if len(data) > FEED_BYTES:
            self._let_others_read()
        if self._busy or self.blocked or self._backlog:
            self._set_aside(data)
            return
        self._feed(data)

    def eof_received(self) -> None:
        """A client that has closed its sending side counts as gone."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Closed by either side."""
        del exc
        self._context.clients.discard(self)
        self._port.leave(self)
        self._reader.close()
        self._backlog.clear()
        self._waiting_bytes = 0
        self._account()
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
        elif not (self._busy or self._deaf):
            self._rest()

    def run(self, running: Running) -> None:
        """Say what works on the present request, so that it hears of the client."""
        self._running = running

    def write(self, data: bytes) -> None:
        """Send bytes of the response."""
        self._outbox.post(self.transport, data)

    def respond(
        self,
        status: int,
        fields: bytes,
        body: bytes,
        request_id: bytes,
        *,
        with_body: bool = True,
    ) -> None:
        """A whole response; without its body: what HEAD asks for."""
        reusable = self.keep_alive and not self._context.draining
        if not reusable:
            fields += headers.CLOSE
        raw = headers.build_head(status, fields, request_id, len(body))
        if not with_body:
            self.write(raw)
        elif len(body) <= JOINED_BYTES:
            self.write(raw + body)
        else:
            self.write(raw)
            self.write(body)
        self.end(reusable)

    def end(self, reusable: bool) -> None:
        """The response is complete; not reusable: close the connection after it."""
        self._running = None
        if not reusable or not self.keep_alive or self._context.draining:
            self._wait(self._context.config.timeouts.idle_s)
            self._close()
            return
        self._busy = False
        self._rest()

    def drop(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def idle_since(self) -> float:
        """When it last had no request, or began to send one's body; infinite: it is answered."""
        if self._busy:
            return math.inf
        return self._begun_at if self._reader.reading_body else self._idle_since

    def sweep(self, now: float) -> None:
        """Keep the deadline of an idle, sending or closing client."""
        if now <= self._deadline or (self._busy and not self.transport.is_closing()):
            return
        if self._receiving and not (self._deaf or self.blocked or self.transport.is_closing()):
            self._reader.refuse(_TOO_SLOW)
            self._refuse(_TOO_SLOW)
        else:
            self.transport.abort()

    def close_if_idle(self) -> None:
        """The gateway ends: nothing is lost by closing this one."""
        if not self._busy:
            self._close()

    def _close(self) -> None:
        self._outbox.flush()
        self.transport.close()

    def _feed(self, data: bytes) -> None:
        reader = self._reader
        for start in range(0, len(data), FEED_BYTES):
            if reader.ready or reader.refusal is not None:
                self._set_aside(data[start:])
                break
            reader.feed(data[start : start + FEED_BYTES])
        if reader.ready:
            self._next()
        else:
            self._wait_for_rest()
            self._account()
            self._attend()

    def _wait_for_rest(self) -> None:
        """A head has one deadline, however slowly it drips in; a body a least rate beside."""
        now, idle_s = self._context.clock(), self._context.config.timeouts.idle_s
        if not self._receiving:
            self._receiving, self._begun_at = True, now
            self._deadline = now + idle_s
        elif self._reader.reading_body:
            slowest_s = idle_s + self._reader.body_bytes / LEAST_BODY_RATE
            self._deadline = min(now + idle_s, self._begun_at + slowest_s)

    def _let_others_read(self) -> None:
        """Read on in the next turn: the event loop reads up to 32 times in a row from a client."""
        self.transport.pause_reading()
        asyncio.get_running_loop().call_soon(self._read_on)

    def _read_on(self) -> None:
        if not self._backlog:
            self.transport.resume_reading()

    def _set_aside(self, data: bytes) -> None:
        """Keep for later what has been read already, and read no more."""
        self._backlog.append(data)
        self.transport.pause_reading()
        self._account()

    def _account(self) -> bool:
        """Count what is kept of requests that are not handled yet.

        False: it is too much, and has been let go of.
        """
        context = self._context
        kept = self._reader.kept_bytes + sum(map(len, self._backlog)) + self._waiting_bytes
        has_room = True
        grown = kept - self._kept_bytes
        if grown > 0 and context.partial_bytes + grown > context.config.max_partial_bytes:
            self._reader.refuse(_FULL)
            self._backlog.clear()
            kept, grown, has_room = 0, -self._kept_bytes, False
        self._kept_bytes = kept
        context.partial_bytes += grown
        return has_room

    def _go_on(self) -> None:
        """Turn to what arrived while the last request was being answered."""
        if self._busy or self._deaf or self.blocked or self.transport.is_closing():
            # Bytes that came first have brought it further already.
            return
        if self._reader.ready:
            self._next()
            return
        self._attend()
        if self._backlog and not self._deaf:
            backlog = b"".join(self._backlog)
            self._backlog.clear()
            self.transport.resume_reading()
            self._feed(backlog)

    def _next(self) -> None:
        request = self._reader.ready.pop(0)
        self._busy, self._receiving = True, False
        self.keep_alive = request.keep_alive and request.http11
        self.chunked = request.http11
        if len(request.body) > LARGE_BODY_BYTES:
            self._handle_large(request)
        else:
            if self._kept_bytes:
                self._account()
            self._handler.handle(self, request)

    def _handle_large(self, request: Request) -> None:
        """Scan a large body in steps, between which others are served, and handle the request.

        Until then the body counts as kept.
        """
        context = self._context
        began = context.clock()
        if self.transport.is_closing():
            return
        wait_s = context.large_body_at - began
        self._waiting_bytes = len(request.body) if wait_s > 0 else 0
        if not self._account():
            self._busy, self._waiting_bytes = False, 0
            self._refuse(_FULL)
            return
        if wait_s > 0:
            asyncio.get_running_loop().call_later(wait_s, self._handle_large, request)
            return
        if request.scan is None and len(request.body) >= MIN_BYTES:
            request.scan = BodyScan(request.body)
        is_scanned = request.scan is None or request.scan.step()
        if is_scanned:
            self._handler.handle(self, request)
        context.large_body_at = began + (context.clock() - began) / LARGE_BODY_SHARE
        if not is_scanned:
            self._handle_large(request)

    def _attend(self) -> None:
        """No whole request is left: refuse the next one, or ask for its body."""
        if self._reader.refusal is not None:
            self._refuse(self._reader.refusal)
        elif self._reader.wants_continue:
            self._reader.wants_continue = False
            self.write(headers.CONTINUE)

    def _refuse(self, error: ApiError) -> None:
        """Answer without reading on, then listen no more and close."""
        self._deaf = True
        self._backlog.clear()
        self._account()
        self.transport.resume_reading()
        body = error.to_json()
        request_id = self._context.make_id()
        fields = build_error_fields(error) + headers.CLOSE
        self.write(headers.build_head(error.status, fields, request_id, len(body)) + body)
        self._context.metrics.requests["", "refused"] += 1
        self._handler.note(request_id, error.status)
        if self.transport.can_write_eof():
            self._outbox.flush()
            self.transport.write_eof()
        self._wait(LINGER_S)

    def _discard(self, count: int) -> None:
        """Throw away what a refused client sends, no faster than others can bear."""
        context = self._context
        context.discarded_bytes += count
        if context.discarded_bytes > DISCARD_BYTES:
            self.transport.pause_reading()
            asyncio.get_running_loop().call_later(DISCARD_PAUSE_S, self._discard_on)

    def _discard_on(self) -> None:
        if self.transport.is_closing():
            return
        self.transport.resume_reading()
        self._discard(0)

    def _rest(self) -> None:
        """No request is answered: wait for one, or turn soon to what has arrived."""
        now, reader = self._context.clock(), self._reader
        self._idle_since = self._begun_at = now
        self._deadline = now + self._context.config.timeouts.keep_alive_s
        waits = self._backlog or reader.ready or reader.refusal is not None or reader.wants_continue
        if waits and not self.blocked:
            asyncio.get_running_loop().call_soon(self._go_on)

    def _wait(self, seconds: float) -> None:
        self._deadline = self._context.clock() + seconds
