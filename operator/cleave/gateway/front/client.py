"""A client's connection: takes requests, one at a time, and writes responses.

Made by the event loop for each connection. What is hard: HTTP/1.1 lets a client send its next
request before the answer to the last; what has arrived is kept, and no more is read, until its turn
comes. Reading goes on while an engine works as long as nothing comes, for only reading tells that
the client has gone.
"""

import asyncio
from typing import Protocol, cast

from cleave.gateway import head
from cleave.gateway.context import Context
from cleave.gateway.engines.engine import set_nodelay
from cleave.gateway.errors import ApiError, build_error_fields
from cleave.gateway.request import Request, RequestReader

LINGER_S = 5.0
"""How long what a refused client still sends is thrown away, so that it reads the refusal."""
WRITE_BUFFER_BYTES = 256 << 10


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

    def note(self, request_id: bytes, status: int, request: Request | None = None) -> None:
        """A request has been answered without an engine; None: it is not even one."""


class ClientConnection(asyncio.Protocol):
    """One client."""

    transport: asyncio.Transport

    def __init__(self, context: Context, handler: Handler) -> None:
        self._context = context
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
        self._wait(self._context.config.timeouts.keep_alive_s)
        self._context.clients.add(self)
        if len(self._context.clients) > self._context.config.max_clients:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read, or keep for later while a request is being answered."""
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
        self._reader.close()
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
            fields += head.CLOSE
        raw = head.build_head(status, fields, request_id, len(body))
        self.write(raw + body if with_body else raw)
        self.end(reusable)

    def end(self, reusable: bool) -> None:
        """The response is complete; not reusable: close the connection after it."""
        self._running = None
        if not reusable or not self.keep_alive or self._context.draining:
            self._wait(self._context.config.timeouts.idle_s)
            self._close()
            return
        self._busy = False
        self._wait(self._context.config.timeouts.keep_alive_s)
        reader = self._reader
        if self._backlog or reader.ready or reader.refusal is not None or reader.wants_continue:
            asyncio.get_running_loop().call_soon(self._go_on)

    def drop(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def sweep(self, now: float) -> None:
        """Keep the deadline of an idle, sending or closing client."""
        if now > self._deadline and (not self._busy or self.transport.is_closing()):
            self.transport.abort()

    def close_if_idle(self) -> None:
        """The gateway ends: nothing is lost by closing this one."""
        if not self._busy:
            self._close()

    def _close(self) -> None:
        self._outbox.flush()
        self.transport.close()

    def _feed(self, data: bytes) -> None:
        self._reader.feed(data)
        if self._reader.ready:
            self._next()
        else:
            if self._reader.reading_body or not self._receiving:
                # A head has one deadline, however slowly it drips in; a body goes on.
                self._receiving = True
                self._wait(self._context.config.timeouts.idle_s)
            self._attend()

    def _go_on(self) -> None:
        """Turn to what arrived while the last request was being answered."""
        if self._busy or self._deaf or self.transport.is_closing():
            # Bytes that came first have brought it further already.
            return
        if self._reader.ready:
            self._next()
            return
        self._attend()
        if self._backlog:
            backlog = b"".join(self._backlog)
            self._backlog.clear()
            self.transport.resume_reading()
            if not self._deaf:
                self._feed(backlog)

    def _next(self) -> None:
        request = self._reader.ready.pop(0)
        self._busy, self._receiving = True, False
        self.keep_alive = request.keep_alive and request.http11
        self.chunked = request.http11
        self._handler.handle(self, request)

    def _attend(self) -> None:
        """No whole request is left: refuse the next one, or ask for its body."""
        if self._reader.refusal is not None:
            self._refuse(self._reader.refusal)
        elif self._reader.wants_continue:
            self._reader.wants_continue = False
            self.write(head.CONTINUE)

    def _refuse(self, error: ApiError) -> None:
        """Answer without reading on, then listen no more and close."""
        self._deaf = True
        body = error.to_json()
        request_id = self._context.make_id()
        fields = build_error_fields(error) + head.CLOSE
        self.write(head.build_head(error.status, fields, request_id, len(body)) + body)
        self._context.metrics.requests["", "refused"] += 1
        self._handler.note(request_id, error.status)
        if self.transport.can_write_eof():
            self._outbox.flush()
            self.transport.write_eof()
        self._wait(LINGER_S)

    def _wait(self, seconds: float) -> None:
        self._deadline = self._context.clock() + seconds
