"""Connections to engines: one pool per engine, one call per request to it.

Used by attempts. Everything is a callback, because a task and its wake-ups per request would cost
more than the rest of this hop. What is hard: an engine may close an idle connection at the very
moment a request is sent over it. Only then, when no byte of a response has come, is the call
repeated once on a new connection; for any other failure the proxied request decides. And an engine
may be another program by now, so the framing of an answer is bounded and must leave no doubt: only
headers that are known are kept, and bytes beyond the answer break it.
"""

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import httptools

from cleave.gateway.event_loop_faults import contain, end_after
from cleave.gateway.http.headers import (
    ENGINE_HEADERS,
    Headers,
    build_header_line,
    sanitize_header_value,
)
from cleave.gateway.http.write_batcher import WriteBatcher
from cleave.gateway.upstream.circuit_breaker import StallDetector
from cleave.router.instance import Target
from cleave.router.watchdog import is_overdue
from cleave.rpc.engine_key import HEADER
from cleave.time_slices import TurnQueue

IDLE_S = 4.0
"""uvicorn, vLLM's HTTP server, closes idle connections after 5 s; the gateway closes them first."""
DEAD_PEER_TIMEOUT_S = 10
"""A host that has acknowledged no packet for so long is dead, however long a response takes."""
KEEPALIVE_INTERVAL_S = 2
MAX_FRAMING_BYTES = 64 << 10
"""Limit of what an engine sends without content: heads, interim responses, trailers."""
FEED_BYTES = 4 << 10
"""Bytes of an answer that are parsed and relayed at a time: hundreds of tiny events."""
READ_BYTES = 64 << 10
"""About what is read at a time."""
SENT_BYTES = 256 << 10
"""More bytes of a call are sent in pieces of so many: the kernel copies up to megabytes at once."""
_TOO_MUCH = "sent more than its answer"
_NOT_HTTP = httptools.HttpParserError, httptools.HttpParserUpgrade


class CallListener(Protocol):
    """Receives the response to a call."""

    def on_data(self, call: "UpstreamCall", piece: bytes, complete: bool) -> None:
        """A piece of the response's body, perhaps empty; status and headers are in the call."""

    def on_call_failed(self, call: "UpstreamCall", reason: str) -> None:
        """The call failed: no connection, or it broke before the response was complete."""

    def fail(self) -> None:
        """End with an error: a fault of this program has interrupted the call."""


class UpstreamCall:
    """One request to one engine."""

    __slots__ = (
        "connecting", "connection", "headers", "listener", "on_new_connection", "payload", "pool",
        "sent", "status",
    )  # fmt: skip

    def __init__(
        self, pool: "EnginePool", owner: CallListener, payload: Sequence[bytes | memoryview]
    ) -> None:
        self.pool = pool
        self.listener: CallListener | None = owner
        self.payload = payload
        """The request, in pieces that follow each other."""
        self.connection: EngineConnection | None = None
        self.connecting: asyncio.Task[None] | None = None
        self.on_new_connection = False
        self.sent = False
        """Whether it may have reached the engine although no response came."""
        self.status = 0
        """0 until the response's head has come."""
        self.headers: Headers = {}
        """Those of ENGINE_HEADERS."""

    def abort(self) -> None:
        """End the call without a callback. Closing the connection makes the engine stop."""
        self.listener = None
        if self.connecting is not None:
            self.connecting.cancel()
        if self.connection is not None:
            self.connection.abort()

    def report_failure(self, reason: str) -> None:
        """Report the failure to the owner, once."""
        owner, self.listener = self.listener, None
        if owner is not None:
            contain(owner.fail, owner.on_call_failed, self, reason)

    def pause(self) -> None:
        """Stop reading the response until `resume`."""
        if self.connection is not None:
            self.connection.set_paused(True)

    def resume(self) -> None:
        """Read again."""
        if self.connection is not None:
            self.connection.set_paused(False)


class EngineConnection(asyncio.Protocol):
    """One connection, which carries one call at a time."""

    transport: asyncio.Transport

    def __init__(self, pool: "EnginePool") -> None:
        self._pool = pool
        self._call: UpstreamCall | None = None
        self._headers: Headers = {}
        self._parts: list[bytes] = []
        # httptools looks up its callbacks once: a list's own append is the cheapest one.
        self.on_body = self._parts.append
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._head_done = self._complete = self._received_any = self._reusable = False
        self._framing_bytes = 0
        """Bytes of reads that contained no content."""
        self._fault = ""
        """What is wrong with the response, found while it is parsed."""
        self._unread: deque[bytes] = deque()
        """What was read and not parsed, in pieces."""
        self._unsent: deque[memoryview] = deque()
        """What is to be sent of a large call, in pieces."""
        self._is_paused = False
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set up by the event loop."""
        self.transport = cast("asyncio.Transport", transport)
        contain(self.transport.abort, self._set_options)

    def _set_options(self) -> None:
        set_nodelay(self.transport)
        limit_reads(self.transport)
        detect_dead_peer(self.transport)

    def send(self, call: UpstreamCall) -> None:
        """Send a call over this idle connection."""
        self._call = call
        call.connection = self
        self._head_done = self._complete = self._received_any = False
        self._framing_bytes = 0
        if sum(map(len, call.payload)) > SENT_BYTES:
            for piece in call.payload:
                view, size = memoryview(piece), len(piece)
                self._unsent += [view[at : at + SENT_BYTES] for at in range(0, size, SENT_BYTES)]
            self._pool.turns.add(self)
            return
        write_batcher = self._pool.write_batcher
        for piece in call.payload:
            write_batcher.write(self.transport, piece)

    def abort(self) -> None:
        """Close at once."""
        self._call = None
        self.transport.abort()

    def set_paused(self, paused: bool) -> None:
        """Pause or resume reading the response."""
        self._is_paused = paused
        if paused:
            self.transport.pause_reading()
        elif self._unread:
            self._pool.turns.add(self)
        else:
            self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        """Parse what was read; in turns with other connections, if it is much."""
        if self._unread or len(data) > FEED_BYTES:
            self._unread += [data[at : at + FEED_BYTES] for at in range(0, len(data), FEED_BYTES)]
            self.transport.pause_reading()
            self._pool.turns.add(self)
        else:
            self._parse(data)

    def take_turn(self) -> None:
        """Send a piece of a large call, or parse one of what was read."""
        if self._unsent and not self.transport.is_closing():
            self.transport.write(self._unsent.popleft())
            self._pool.turns.add(self)
            return
        if self._unread and not self._is_paused:
            self._parse(self._unread.popleft())
        if self._is_paused:
            return
        if self._unread:
            self._pool.turns.add(self)
        elif not self.transport.is_closing():
            self.transport.resume_reading()

    def _parse(self, data: bytes) -> None:
        """Parse, and give the body bytes to the owner; a fault of this program ends both."""
        call, parser = self._call, self._parser
        if call is None or parser is None:
            self._unread.clear()
            self.transport.abort()
            return
        owner, self._received_any = call.listener, True
        try:
            parser.feed_data(data)
            if self._complete and self._unread:
                self._fault = _TOO_MUCH
            if self._fault:
                self._fail_call(self._fault)
                return
            parts, complete = self._parts, self._complete
            piece = parts[0] if len(parts) == 1 else b"".join(parts)
            parts.clear()
            if complete:
                self._finish_call(call)
            elif not (piece and self._head_done):
                # Of a head, a chunk's frame or trailers.
                self._count_framing(len(data))
                return
            if call.listener is not None:
                call.listener.on_data(call, piece, complete)
        except Exception as error:  # noqa: BLE001 - as `contain`, without a call per token
            is_fault = isinstance(error, httptools.HttpParserCallbackError)
            if isinstance(error, _NOT_HTTP) and not is_fault:
                self._fail_call("sent an answer that is not HTTP")
                return
            if self._call is call:
                self.abort()
            if owner is not None:
                end_after(error, owner.fail)

    def on_message_begin(self) -> None:
        """A response, or an interim one, begins."""
        if self._complete:
            self._fault = _TOO_MUCH

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header line, or a trailer."""
        name = name.lower()
        if name in ENGINE_HEADERS and not self._head_done:
            self._headers[name] = value

    def on_headers_complete(self) -> None:
        """The head is complete; an interim response (1xx) is ignored."""
        headers, self._headers = self._headers, {}
        if self._call is None or self._parser is None:
            return
        status = self._parser.get_status_code()
        if not 100 <= status < 600:
            self._fault = f"answered with status {status}"
        elif status >= 200:
            self._head_done = True
            self._reusable = self._parser.should_keep_alive()
            self._call.status = status
            # It will not be sent again, and may be large.
            self._call.payload = ()
            self._call.headers = headers

    def on_message_complete(self) -> None:
        """The response, or an interim one, is complete."""
        self._complete = self._head_done

    def connection_lost(self, exc: Exception | None) -> None:
        """Closed by either side. A response without a length, which would end here, may be a part
        of one: engines send none."""
        del exc
        self._unread.clear()
        self._unsent.clear()
        self._pool.remove(self)
        self._fail_call("closed the connection")
        self._parser = None

    def _count_framing(self, size: int) -> None:
        self._framing_bytes += size
        if self._framing_bytes > MAX_FRAMING_BYTES:
            self._fail_call("sent a head, or trailers, without an end")

    def _finish_call(self, call: UpstreamCall) -> None:
        self._call = call.connection = None
        if self._reusable and not self._unsent:
            self._pool.return_idle(self)
        else:
            self.transport.close()

    def _fail_call(self, reason: str) -> None:
        call, self._call = self._call, None
        if call is None:
            return
        call.connection = None
        call.sent = True
        self.transport.abort()
        owner = call.listener
        if not self._received_any and not call.on_new_connection and owner is not None:
            contain(owner.fail, self._pool.send_on_new_connection, call)
        else:
            call.report_failure(reason)


class EnginePool:
    """The connections to one engine."""

    def __init__(
        self,
        target: Target,
        limit: int,
        connect_s: float,
        clock: Callable[[], float],
        write_batcher: WriteBatcher,
        turns: TurnQueue,
    ) -> None:
        self.write_batcher = write_batcher
        self.turns = turns
        self.host = target.endpoint.encode()
        key = target.engine_key
        self.key_header = build_header_line(HEADER, key) if key else b""
        """Header line with the engine's key, for every request."""
        name = sanitize_header_value(target.instance)
        self.prefill_header = b"x-cleave-prefill: %b\r\n" % name
        self.decode_header = b"x-cleave-decode: %b\r\n" % name
        """Header lines that name the instance to the client."""
        self.stall_detector = StallDetector(clock())
        """Detects that the engine's streams have stalled."""
        self._target = target
        self._limit = limit
        self._connect_s = connect_s
        self._clock = clock
        self._idle: list[EngineConnection] = []
        self._open: set[EngineConnection] = set()
        self._connecting: set[asyncio.Task[None]] = set()

    @property
    def is_empty(self) -> bool:
        """No connection is open or being opened."""
        return not self._open and not self._connecting

    def send(self, owner: CallListener, payload: Sequence[bytes | memoryview]) -> UpstreamCall:
        """Begin a call; the owner is called back later, never from within this method."""
        call = UpstreamCall(self, owner, payload)
        if self._idle:
            self._idle.pop().send(call)
        else:
            self.send_on_new_connection(call)
        return call

    def send_on_new_connection(self, call: UpstreamCall) -> None:
        """Begin, or repeat, a call on a new connection."""
        call.on_new_connection = True
        task = asyncio.get_running_loop().create_task(self._connect_or_end(call))
        call.connecting = task
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def return_idle(self, connection: EngineConnection) -> None:
        """Return a connection whose call is complete to the pool."""
        connection.idle_since = self._clock()
        self._idle.append(connection)

    def remove(self, connection: EngineConnection) -> None:
        """Remove a closed connection."""
        self._open.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    def close_idle(self, now: float) -> None:
        """Close connections that have been idle too long; the oldest come first."""
        while self._idle and now - self._idle[0].idle_since > IDLE_S:
            self._idle.pop(0).abort()

    def close(self) -> None:
        """Close every connection, including those with calls."""
        for task in tuple(self._connecting):
            task.cancel()
        for connection in tuple(self._open):
            connection.abort()

    async def _connect_or_end(self, call: UpstreamCall) -> None:
        owner = call.listener
        try:
            await self._connect(call)
        except Exception as error:  # noqa: BLE001 - as `contain`
            call.abort()
            if owner is not None:
                end_after(error, owner.fail)

    async def _connect(self, call: UpstreamCall) -> None:
        if len(self._open) + len(self._connecting) > self._limit:
            call.report_failure("has no connection left")
            return
        connection, is_last = None, False
        while connection is None:
            limit = asyncio.timeout(self._connect_s)
            try:
                async with limit:
                    connection = await self._open_connection()
            except TimeoutError:
                if is_last or not is_overdue(limit):
                    call.report_failure("cannot be reached: timed out")
                    return
                is_last = True
            except OSError as error:
                # Its text contains the address, which is not for clients.
                reason = os.strerror(error.errno) if error.errno else "no connection"
                call.report_failure(f"cannot be reached: {reason}")
                return
        call.connecting = None
        if connection.transport.is_closing():
            # It has not heard of the call, and will not report its end.
            call.report_failure("closed the connection")
            return
        self._open.add(connection)
        if call.listener is None:
            self.return_idle(connection)
        else:
            connection.send(call)

    async def _open_connection(self) -> EngineConnection:
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: EngineConnection(self), self._target.host, self._target.port
        )
        return connection


def detect_dead_peer(transport: asyncio.Transport) -> None:
    """Make the kernel break the connection to a dead host, but not to a slow engine.
    A host that lost power or network sends nothing, and a complete response may take minutes."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_INTERVAL_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_PEER_TIMEOUT_S * 1_000)


def limit_reads(transport: asyncio.Transport) -> None:
    """Keep the kernel from receiving more than is parsed soon: what was read waits in memory."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, READ_BYTES)


def set_nodelay(transport: asyncio.Transport) -> None:
    """Send each piece at once: Nagle's algorithm could delay a token by up to 40 ms."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
