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

from cleave.gateway.context import GatewayContext
from cleave.gateway.http import headers
from cleave.gateway.http.completion_request import BodyScan
from cleave.gateway.http.connection_limiter import ConnectionLimiter
from cleave.gateway.http.errors import GatewayError, build_error_headers
from cleave.gateway.http.large_json import MIN_BYTES
from cleave.gateway.http.request_parser import HttpRequest, RequestParser
from cleave.gateway.upstream.connection_pool import set_nodelay

LINGERING_CLOSE_S = 5.0
"""How long what a refused client still sends is thrown away, so that it reads the refusal."""
DISCARD_BYTES = 1 << 20
"""Of it, of all refused clients, between two rounds of the sweeper."""
DISCARD_PAUSE_S = 0.1
WRITE_BUFFER_BYTES = 256 << 10
MAX_JOINED_BYTES = 16 << 10
"""A longer body is sent as it is, for a page that is kept goes to many clients at once."""
FEED_BYTES = 16 << 10
"""Read at once: of what one read brings, more pipelined requests than fit in it are not made."""
LARGE_BODY_BYTES = 256 << 10
LARGE_BODY_SHARE = 1 / 8
"""Of the event loop's time that larger bodies get: each holds it while its JSON is read."""
MIN_BODY_RATE = 64 << 10
"""Bytes a second: a body may take the idle time-out, and what it takes at this rate."""

_REQUEST_TIMEOUT = GatewayError(
    HTTPStatus.REQUEST_TIMEOUT,
    "the request did not come in time",
    "invalid_request_error",
    code="request_timeout",
)
_RECEIVE_LIMIT_REACHED = GatewayError(
    HTTPStatus.SERVICE_UNAVAILABLE,
    "too many large requests are being received at once: send it again",
    "server_error",
    code="receiving_too_much",
    retry_after_s=1,
)


class ActiveRequest(Protocol):
    """What works on a request."""

    def cancel(self) -> None:
        """The client is gone."""

    def set_paused(self, blocked: bool) -> None:
        """The client takes no more, or takes bytes again."""


class RequestHandler(Protocol):
    """What requests are given to."""

    def check(self, request: HttpRequest) -> GatewayError | None:
        """Look at the head of a request whose body is still to come; an error refuses it."""

    def handle(self, client: "ClientConnection", request: HttpRequest) -> None:
        """Answer a request, now or later, through the client's methods."""

    def record_response(
        self, request_id: bytes, status: int, request: HttpRequest | None = None
    ) -> None:
        """A request has been answered without an engine; None: it is not even one."""


class ClientConnection(asyncio.Protocol):
    """One client."""

    transport: asyncio.Transport

    def __init__(
        self, context: GatewayContext, handler: RequestHandler, limiter: ConnectionLimiter
    ) -> None:
        """`limiter`: where it counts."""
        self._context = context
        self._limiter = limiter
        self._write_batcher = context.write_batcher
        self._handler = handler
        self._reader = RequestParser(
            context.config.max_body_bytes, handler.check, context.extra_headers
        )
        self._backlog: list[bytes] = []
        self._discarding = False
        self._busy = False
        self._receiving = False
        self._active_request: ActiveRequest | None = None
        self._deadline = 0.0
        self._idle_since = 0.0
        self._request_started_at = 0.0
        """When the request began that is not whole."""
        self._buffered_bytes = 0
        """Its part of the context's partial_bytes."""
        self._delayed_body_bytes = 0
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
        self._become_idle()
        self._context.clients.add(self)
        if not self._limiter.admit(self, transport.get_extra_info("peername")):
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read, or keep for later while a request is answered or the client takes nothing."""
        if self._discarding:
            self._discard(len(data))
            return
        if len(data) > FEED_BYTES:
            self._yield_reading()
        if self._busy or self.blocked or self._backlog:
            self._buffer_input(data)
            return
        self._feed(data)

    def eof_received(self) -> None:
        """A client that has closed its sending side counts as gone."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Closed by either side."""
        del exc
        self._context.clients.discard(self)
        self._limiter.remove(self)
        self._reader.close()
        self._backlog.clear()
        self._delayed_body_bytes = 0
        self._update_buffered_bytes()
        running, self._active_request = self._active_request, None
        if running is not None:
            running.cancel()

    def pause_writing(self) -> None:
        """The client does not keep up."""
        self.blocked = True
        if self._active_request is not None:
            self._active_request.set_paused(True)

    def resume_writing(self) -> None:
        """The client has caught up."""
        self.blocked = False
        if self._active_request is not None:
            self._active_request.set_paused(False)
        elif not (self._busy or self._discarding):
            self._become_idle()

    def set_active_request(self, active_request: ActiveRequest) -> None:
        """Say what works on the present request, so that it hears of the client."""
        self._active_request = active_request

    def write(self, data: bytes) -> None:
        """Send bytes of the response."""
        self._write_batcher.write(self.transport, data)

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
            fields += headers.CONNECTION_CLOSE
        raw = headers.build_response_head(status, fields, request_id, len(body))
        if not with_body:
            self.write(raw)
        elif len(body) <= MAX_JOINED_BYTES:
            self.write(raw + body)
        else:
            self.write(raw)
            self.write(body)
        self.end(reusable)

    def end(self, reusable: bool) -> None:
        """The response is complete; not reusable: close the connection after it."""
        self._active_request = None
        if not reusable or not self.keep_alive or self._context.draining:
            self._set_deadline(self._context.config.timeouts.idle_s)
            self._close()
            return
        self._busy = False
        self._become_idle()

    def drop(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def get_idle_since(self) -> float:
        """When it last had no request, or began to send one's body; infinite: it is answered."""
        if self._busy:
            return math.inf
        return self._request_started_at if self._reader.reading_body else self._idle_since

    def check_deadline(self, now: float) -> None:
        """Keep the deadline of an idle, sending or closing client."""
        if now <= self._deadline or (self._busy and not self.transport.is_closing()):
            return
        if self._receiving and not (
            self._discarding or self.blocked or self.transport.is_closing()
        ):
            self._reader.reject(_REQUEST_TIMEOUT)
            self._reject(_REQUEST_TIMEOUT)
        else:
            self.transport.abort()

    def close_if_idle(self) -> None:
        """The gateway ends: nothing is lost by closing this one."""
        if not self._busy:
            self._close()

    def _close(self) -> None:
        self._write_batcher.flush()
        self.transport.close()

    def _feed(self, data: bytes) -> None:
        reader = self._reader
        for start in range(0, len(data), FEED_BYTES):
            if reader.ready or reader.error is not None:
                self._buffer_input(data[start:])
                break
            reader.feed(data[start : start + FEED_BYTES])
        if reader.ready:
            self._dispatch()
        else:
            self._update_receive_deadline()
            self._update_buffered_bytes()
            self._handle_parse_outcome()

    def _update_receive_deadline(self) -> None:
        """A head has one deadline, however slowly it drips in; a body a least rate beside."""
        now, idle_s = self._context.clock(), self._context.config.timeouts.idle_s
        if not self._receiving:
            self._receiving, self._request_started_at = True, now
            self._deadline = now + idle_s
        elif self._reader.reading_body:
            slowest_s = idle_s + self._reader.body_bytes / MIN_BODY_RATE
            self._deadline = min(now + idle_s, self._request_started_at + slowest_s)

    def _yield_reading(self) -> None:
        """Read on in the next turn: the event loop reads up to 32 times in a row from a client."""
        self.transport.pause_reading()
        asyncio.get_running_loop().call_soon(self._resume_reading)

    def _resume_reading(self) -> None:
        if not self._backlog:
            self.transport.resume_reading()

    def _buffer_input(self, data: bytes) -> None:
        """Keep for later what has been read already, and read no more."""
        self._backlog.append(data)
        self.transport.pause_reading()
        self._update_buffered_bytes()

    def _update_buffered_bytes(self) -> bool:
        """Count what is kept of requests that are not handled yet.

        False: it is too much, and has been let go of.
        """
        context = self._context
        kept = self._reader.buffered_bytes + sum(map(len, self._backlog)) + self._delayed_body_bytes
        has_room = True
        grown = kept - self._buffered_bytes
        if grown > 0 and context.partial_bytes + grown > context.config.max_partial_bytes:
            self._reader.reject(_RECEIVE_LIMIT_REACHED)
            self._backlog.clear()
            kept, grown, has_room = 0, -self._buffered_bytes, False
        self._buffered_bytes = kept
        context.partial_bytes += grown
        return has_room

    def _resume_parsing(self) -> None:
        """Turn to what arrived while the last request was being answered."""
        if self._busy or self._discarding or self.blocked or self.transport.is_closing():
            # Bytes that came first have brought it further already.
            return
        if self._reader.ready:
            self._dispatch()
            return
        self._handle_parse_outcome()
        if self._backlog and not self._discarding:
            backlog = b"".join(self._backlog)
            self._backlog.clear()
            self.transport.resume_reading()
            self._feed(backlog)

    def _dispatch(self) -> None:
        request = self._reader.ready.pop(0)
        self._busy, self._receiving = True, False
        self.keep_alive = request.keep_alive and request.http11
        self.chunked = request.http11
        if len(request.body) > LARGE_BODY_BYTES:
            self._handle_large(request)
        else:
            if self._buffered_bytes:
                self._update_buffered_bytes()
            self._handler.handle(self, request)

    def _handle_large(self, request: HttpRequest) -> None:
        """Scan a large body in steps, between which others are served, and handle the request.

        Until then the body counts as kept.
        """
        context = self._context
        began = context.clock()
        if self.transport.is_closing():
            return
        wait_s = context.large_body_at - began
        self._delayed_body_bytes = len(request.body) if wait_s > 0 else 0
        if not self._update_buffered_bytes():
            self._busy, self._delayed_body_bytes = False, 0
            self._reject(_RECEIVE_LIMIT_REACHED)
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

    def _handle_parse_outcome(self) -> None:
        """No whole request is left: refuse the next one, or ask for its body."""
        if self._reader.error is not None:
            self._reject(self._reader.error)
        elif self._reader.expects_continue:
            self._reader.expects_continue = False
            self.write(headers.CONTINUE_RESPONSE)

    def _reject(self, error: GatewayError) -> None:
        """Answer without reading on, then listen no more and close."""
        self._discarding = True
        self._backlog.clear()
        self._update_buffered_bytes()
        self.transport.resume_reading()
        body = error.to_json()
        request_id = self._context.make_request_id()
        fields = build_error_headers(error) + headers.CONNECTION_CLOSE
        self.write(headers.build_response_head(error.status, fields, request_id, len(body)) + body)
        self._context.metrics.requests["", "refused"] += 1
        self._handler.record_response(request_id, error.status)
        if self.transport.can_write_eof():
            self._write_batcher.flush()
            self.transport.write_eof()
        self._set_deadline(LINGERING_CLOSE_S)

    def _discard(self, count: int) -> None:
        """Throw away what a refused client sends, no faster than others can bear."""
        context = self._context
        context.discarded_bytes += count
        if context.discarded_bytes > DISCARD_BYTES:
            self.transport.pause_reading()
            asyncio.get_running_loop().call_later(DISCARD_PAUSE_S, self._resume_discarding)

    def _resume_discarding(self) -> None:
        if self.transport.is_closing():
            return
        self.transport.resume_reading()
        self._discard(0)

    def _become_idle(self) -> None:
        """No request is answered: wait for one, or turn soon to what has arrived."""
        now, reader = self._context.clock(), self._reader
        self._idle_since = self._request_started_at = now
        self._deadline = now + self._context.config.timeouts.keep_alive_s
        waits = self._backlog or reader.ready or reader.error is not None or reader.expects_continue
        if waits and not self.blocked:
            asyncio.get_running_loop().call_soon(self._resume_parsing)

    def _set_deadline(self, seconds: float) -> None:
        self._deadline = self._context.clock() + seconds
