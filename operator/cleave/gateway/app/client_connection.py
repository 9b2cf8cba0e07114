"""A client connection: receives requests, handles one at a time, and writes responses.

Created by the event loop for each connection. What is hard: HTTP/1.1 lets a client send its next
request before it has the previous response. Data that arrives early is buffered and reading is
paused until the previous response is complete and the client has read it. While an engine works
and nothing arrives, reading stays enabled, because only reading detects a disconnect.
"""

import asyncio
import math
import socket
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from time import monotonic
from typing import Protocol, cast

from cleave.gateway.context import GatewayContext
from cleave.gateway.event_loop_faults import contain
from cleave.gateway.http import headers
from cleave.gateway.http.address_debts import EXPECTED_S
from cleave.gateway.http.connection_limiter import ConnectionLimiter, get_address_group
from cleave.gateway.http.error_dialects import encode_error
from cleave.gateway.http.errors import (
    INTERNAL_FAULT,
    RECEIVE_LIMIT_REACHED,
    TOO_MANY_WRONG_KEYS,
    WRONG_KEY,
    GatewayError,
    build_error_headers,
)
from cleave.gateway.http.request_parser import MIN_BODY_RATE, HttpRequest, RequestParser
from cleave.gateway.upstream.connection_pool import set_nodelay
from cleave.time_slices import SLICE_S

WRONG_KEY_DELAY_S = 5.0
"""How long a client that has sent too many wrong keys waits for each further answer."""
CONNECTION_BYTES = 4 << 10
"""Memory of a connection without TLS."""
REQUEST_BYTES = 400
"""Memory of a request that waits for its turn, besides its bytes."""
LINGERING_CLOSE_S = 5.0
"""How long data of a rejected client is discarded, so that it can read the error response."""
END_S = 0.1
"""How long the end of an answer may take to be sent to a client that is closed to make room."""
DISCARD_BYTES = 1 << 20
"""Limit of discarded data of all rejected clients between two ticks of the sweeper."""
DISCARD_PAUSE_S = 0.1
WRITE_BUFFER_BYTES = 4 << 10
"""Unread bytes in memory at which a client counts as blocked, ..."""
SEND_BUFFER_BYTES = 32 << 10
"""... and those which its socket holds besides. Linux takes twice as much for them, and by default
up to 4 MiB, of the memory of the pod."""
RECEIVE_BUFFER_BYTES = 64 << 10
"""Likewise for what a client sends while it is not read; by default up to 32 MiB."""
FEED_BYTES = 4 << 10
"""Bytes parsed at a time, which limits the pipelined requests that one read creates."""
LARGE_READ_BYTES = 32 << 10
"""Of what is read at once above this, all but the beginning is parsed in turns with others."""
PIECE_BYTES = 64 << 10
"""More bytes of a response are sent in pieces of so many, as the client takes them."""
TURN_BYTES = 256 << 10
"""Sent to one client at a time: copying and encrypting them takes up to 1 ms."""
SMALL_BODY_BYTES = 16 << 10
"""Larger bodies count as buffered until their answer is complete."""

_REQUEST_TIMEOUT = GatewayError(
    HTTPStatus.REQUEST_TIMEOUT, "the request was not received in time", code="request_timeout"
)


class ActiveRequest(Protocol):
    """The handling of the current request of a connection."""

    def cancel(self) -> None:
        """The client has disconnected."""

    def set_paused(self, blocked: bool) -> None:
        """Pause or resume writing: the client's write buffer is full, or has room again."""


class RequestHandler(Protocol):
    """Handles the requests of a connection."""

    def check(self, request: HttpRequest) -> GatewayError | None:
        """Validate the head of a request whose body is still to come; an error rejects it."""

    def handle(self, client: "ClientConnection", request: HttpRequest) -> None:
        """Respond to a request, now or later, through the client's methods."""

    def record_response(self, request_id: bytes, status: int, request: HttpRequest | None) -> None:
        """Record a response that no engine gave; `request` None: it could not be parsed."""


class ClientConnection(asyncio.Protocol):
    """One client."""

    transport: asyncio.Transport

    def __init__(
        self, context: GatewayContext, handler: RequestHandler, limiter: ConnectionLimiter
    ) -> None:
        """`limiter`: the limit of connections that it counts toward."""
        self._context = context
        self._limiter = limiter
        self._write_batcher = context.write_batcher
        self._handler = handler
        limit, names = context.config.max_body_bytes, context.extra_headers
        self._reader = RequestParser(limit, handler.check, names)
        self._backlog: list[bytes] = []
        self._discarding = False
        self._late_response = b""
        """An error response that is sent at the deadline."""
        self._busy = False
        self._receiving = False
        self.active_request: ActiveRequest | None = None
        """The handling of the current request."""
        self._deadline = 0.0
        self._idle_since = 0.0
        self._request_started_at = 0.0
        """When the incomplete request began."""
        self._buffered_bytes = 0
        """What it has reserved for requests."""
        self._body_bytes = 0
        """Bytes of the current request's body, unless it is small."""
        self.keep_alive = True
        """Whether the client may send another request over this connection."""
        self.chunked = True
        """Whether the client supports chunked bodies (HTTP/1.1)."""
        self.blocked = False
        """Whether the write buffer is full, or bytes of the response wait for room in it."""
        self._is_full = False
        """Whether the write buffer is full."""
        self._unsent: deque[bytes | memoryview] = deque()
        """What waits for room."""
        self._own_unsent_bytes = 0
        """Of it, what no other client gets as well."""
        self._ending: bool | None = None
        """Whether the client may send another request once it has taken all of a complete response;
        None: the response is not complete, or nothing of it waits."""
        self.address = ""
        """Of the client, as it counts."""
        self.has_settled = limiter is context.internal_limiter
        """Whether it has sent a request to an engine, with a key; on the internal port always."""
        self._is_silent = False
        """Whether it counts as one that is still to send such a request."""
        self._takes_turns = self._is_new = not self.has_settled
        """Whether what it sends waits for a turn, and whether it has sent no request yet."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self.transport = cast("asyncio.Transport", transport)
        contain(self.transport.abort, self._begin)

    def _begin(self) -> None:
        transport = self.transport
        set_nodelay(transport)
        # Not of the listening socket: a flood of connections would delay others by 0.2 s and more.
        if (sock := transport.get_extra_info("socket")) is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._become_idle()
        self._context.clients.add(self)
        self.address = get_address_group(transport.get_extra_info("peername"))
        weight = transport.get_extra_info("weight", CONNECTION_BYTES)
        debts = self._context.address_debts
        is_known = not self.has_settled and debts.has_credit(self.address)
        if not self.has_settled:
            debts.add(self.address, 1)
            debts.expect_request(self.address)
            self._is_silent, self._takes_turns = True, not is_known
        if not self._limiter.admit(self, self.address, weight, is_known=is_known):
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse, or buffer while a request is being answered or the write buffer is full."""
        if self._discarding:
            self._discard(len(data))
            return
        if self._busy or self.blocked or self._backlog:
            self._buffer_input(data)
        elif self._takes_turns and not self._reader.reading_body:
            self._backlog.append(data)
            self._wait_for_turn()
            if self._backlog:
                self._pause_reading()
        else:
            self._feed(data, SLICE_S if len(data) <= LARGE_READ_BYTES else 0.0)

    def eof_received(self) -> None:
        """A client that has closed its sending side counts as gone."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection was closed by either side."""
        del exc
        self._context.clients.discard(self)
        self._limiter.remove(self)
        if self._is_silent:
            self._context.address_debts.forget(self.address)
        self._context.keyless_turns.remove(self, self.address)
        self._context.client_turns.remove(self)
        self._reader.close()
        self._backlog.clear()
        self._body_bytes = 0
        self._unsent.clear()
        self._context.buffer_budget.remove_blocked(self)
        running, self.active_request = self.active_request, None
        if running is not None:
            running.cancel()

    def pause_writing(self) -> None:
        """The write buffer is full."""
        self._is_full = True
        self._mark_blocked()

    def resume_writing(self) -> None:
        """The write buffer has room again."""
        self._is_full = False
        if self._unsent or self._ending is not None:
            # Not from here: the event loop would close the connection twice.
            self._call_soon(self._send_unsent)
        else:
            self._send_unsent()

    def _mark_blocked(self) -> None:
        unread = self.transport.get_write_buffer_size() + self._own_unsent_bytes
        unread += 2 * SEND_BUFFER_BYTES
        self._context.buffer_budget.add_blocked(self, unread)
        self.blocked = True
        if self.active_request is not None:
            self.active_request.set_paused(True)

    def _send_unsent(self) -> None:
        """Send as much as the client takes now, or as one turn allows."""
        if self.transport.is_closing():
            self._unsent.clear()
        if self._ending is not None:
            self._set_deadline(self._context.config.timeouts.keep_alive_s)
        sent = 0
        while self._unsent and not self._is_full and sent < TURN_BYTES:
            piece = self._unsent.popleft()
            sent += len(piece)
            self.transport.write(piece)
        self._own_unsent_bytes = max(self._own_unsent_bytes - sent, 0)
        if self._is_full:
            return
        if self._unsent:
            self._call_soon(self._send_unsent)
            return
        self.blocked = False
        self._context.buffer_budget.remove_blocked(self)
        if self.active_request is not None:
            self.active_request.set_paused(False)
        elif self._ending is not None:
            reusable, self._ending = self._ending, None
            self.end(reusable)
        elif not (self._busy or self._discarding):
            self._become_idle()

    def set_active_request(self, active_request: ActiveRequest) -> None:
        """Set the handling of the current request, to notify of disconnects and full buffers."""
        self.active_request = active_request

    def write(self, data: bytes | memoryview) -> None:
        """Send bytes of the response; if they are many, as the client takes them."""
        if self._unsent or len(data) > PIECE_BYTES:
            self.write_pieces([data])
        else:
            self._write_batcher.write(self.transport, data)

    def write_pieces(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Send many bytes of the response, as the client takes them."""
        self._own_unsent_bytes += sum(map(len, pieces))
        views = [memoryview(piece) for piece in pieces]
        self._send_pieces(
            [
                view[at : at + PIECE_BYTES]
                for view in views
                for at in range(0, len(view), PIECE_BYTES)
            ]
        )

    def _send_pieces(self, pieces: Sequence[bytes | memoryview]) -> None:
        is_sending = bool(self._unsent)
        self._unsent.extend(pieces)
        if not is_sending:
            self._write_batcher.flush()
        self._mark_blocked()
        if not is_sending:
            self._send_unsent()

    def respond(
        self,
        status: int,
        fields: bytes,
        body: Sequence[bytes],
        request_id: bytes,
        *,
        with_body: bool = True,
    ) -> None:
        """Send a complete response. `body`: in pieces, which other clients may get as well;
        `with_body` False: for HEAD."""
        reusable = self.keep_alive and not self._context.draining
        if not reusable:
            fields += headers.CONNECTION_CLOSE
        size = sum(map(len, body))
        raw = headers.build_response_head(status, fields, request_id, size)
        if with_body and size <= headers.MAX_JOINED_BYTES:
            self.write(b"".join((raw, *body)))
        else:
            self.write(raw)
            if with_body:
                self._send_pieces(body)
        self.end(reusable)

    def end(self, reusable: bool) -> None:
        """The response is complete; `reusable` False: close the connection after it."""
        self.active_request = None
        if self._unsent:
            self._ending = reusable
            self._set_deadline(self._context.config.timeouts.keep_alive_s)
            return
        if self._body_bytes:
            self._body_bytes = 0
            self._update_buffered_bytes()
        if not reusable or not self.keep_alive or self._context.draining:
            self._set_deadline(self._context.config.timeouts.idle_s)
            self._close()
            return
        self._busy = False
        self._become_idle()

    def settle_debt(self) -> None:
        """Its first request with a key has come."""
        self.has_settled, self._takes_turns, self._is_silent = True, False, False
        self._context.address_debts.settle(self.address)

    def count_wrong_key(self) -> bool:
        """Count a wrong key of this client; False: it is one too many."""
        return self._context.wrong_keys.record(self.address, self._context.clock())

    def reject(self, error: GatewayError, request: HttpRequest | None = None) -> None:
        """Send an error response, discard further data, and close; an error about too many wrong
        keys is sent late. `request`: the rejected one, if it is complete."""
        if error is WRONG_KEY and not self.count_wrong_key():
            error = TOO_MANY_WRONG_KEYS
        rejected = request or self._reader.rejected
        self._discarding, self._busy, self._body_bytes = True, False, 0
        self._backlog.clear()
        self._update_buffered_bytes()
        self.transport.resume_reading()
        body = encode_error(error, rejected.path if rejected is not None else b"")
        request_id = self._context.make_request_id()
        fields = build_error_headers(error) + headers.CONNECTION_CLOSE
        response = headers.build_response_head(error.status, fields, request_id, len(body)) + body
        self._context.metrics.requests["", "refused"] += 1
        self._handler.record_response(request_id, error.status, request)
        if error is TOO_MANY_WRONG_KEYS:
            self._late_response = response
            self._set_deadline(WRONG_KEY_DELAY_S)
        else:
            self._send_last(response)

    def drop(self) -> None:
        """Close at once; if it is idle, once the end of its last answer has been sent."""
        if not (self._busy or self.blocked):
            self._write_batcher.flush()
            if self.transport.get_write_buffer_size():
                self.transport.close()
                asyncio.get_running_loop().call_later(END_S, self.transport.abort)
                return
        self.transport.abort()

    def fail(self, request: HttpRequest | None = None) -> None:
        """A fault of this program has interrupted it: respond with an error if it waits for a
        response of which nothing has been sent, or else close. `request`: its current one."""
        is_waiting = self._busy or self._receiving
        if is_waiting and self.active_request is None and not (self._unsent or self._discarding):
            self.reject(INTERNAL_FAULT, request)
        else:
            self.transport.abort()

    def get_idle_since(self) -> float:
        """When it became idle or began to send a body; infinite while a request is answered."""
        if self._busy and self._ending is None:
            return math.inf
        return self._request_started_at if self._reader.reading_body else self._idle_since

    def is_expected(self) -> bool:
        """Whether it is a new connection of a known client, of which nothing has come."""
        if not self._is_silent or self._receiving:
            return False
        context = self._context
        is_new = context.clock() < self._idle_since + EXPECTED_S
        return is_new and context.address_debts.has_credit(self.address)

    def is_receiving(self) -> bool:
        """Whether a part of a request has come, and not all of it."""
        return self._receiving

    def check_deadline(self, now: float) -> None:
        """Close an idle, sending or closing client whose deadline has passed."""
        is_answering = self._busy and self._ending is None
        if now <= self._deadline or (is_answering and not self.transport.is_closing()):
            return
        if self._late_response:
            late, self._late_response = self._late_response, b""
            self._send_last(late)
            return
        is_closing = self._discarding or self.blocked or self.transport.is_closing()
        if self._receiving and not is_closing:
            self._reader.reject(_REQUEST_TIMEOUT)
            self.reject(_REQUEST_TIMEOUT)
        else:
            self.transport.abort()

    def close_if_idle(self) -> None:
        """Close unless a request is being handled; called when the gateway stops."""
        if not self._busy:
            self._close()

    def _call_soon(self, work: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(contain, self.fail, work)

    def _close(self) -> None:
        self._write_batcher.flush()
        self.transport.close()

    def _feed(self, data: bytes, slice_s: float = SLICE_S) -> None:
        reader, slice_ends_at = self._reader, monotonic() + slice_s
        waits = False
        for start in range(0, len(data), FEED_BYTES):
            waits = bool(start) and monotonic() > slice_ends_at
            if reader.ready or reader.error is not None or waits:
                self._buffer_input(data[start:])
                break
            reader.feed(data[start : start + FEED_BYTES])
        if reader.ready:
            self._dispatch()
        else:
            self._update_receive_deadline()
            self._update_buffered_bytes()
            self._handle_parse_outcome()
            if waits:
                self._wait_for_turn()

    def _update_receive_deadline(self) -> None:
        """Set the deadline: fixed for a head; extended for a body of at least MIN_BODY_RATE."""
        now, idle_s = self._context.clock(), self._context.config.timeouts.idle_s
        if not self._receiving:
            self._receiving, self._request_started_at = True, now
            self._deadline = now + idle_s
        elif self._reader.reading_body:
            slowest_s = idle_s + self._reader.body_bytes / MIN_BODY_RATE
            self._deadline = min(now + idle_s, self._request_started_at + slowest_s)

    def _resume_reading(self) -> None:
        if not self._backlog:
            self.transport.resume_reading()

    def _buffer_input(self, data: bytes) -> None:
        """Buffer data for later, and pause reading."""
        self._backlog.append(data)
        self._pause_reading()

    def _pause_reading(self) -> None:
        self.transport.pause_reading()
        self._update_buffered_bytes()

    def _update_buffered_bytes(self) -> bool:
        """Update the memory reserved for requests.
        False: there is no room, and the buffers have been discarded."""
        size = self._reader.buffered_bytes + sum(map(len, self._backlog)) + self._body_bytes
        size += len(self._reader.ready) * REQUEST_BYTES
        if self._backlog and self._busy:
            size += 2 * RECEIVE_BUFFER_BYTES
        if size == self._buffered_bytes:
            return True
        is_reserved = self._limiter.resize(self, size)
        if not is_reserved:
            self._reader.reject(RECEIVE_LIMIT_REACHED)
            self._backlog.clear()
            size = 0
            self._limiter.resize(self, size)
        self._buffered_bytes = size
        return is_reserved

    def _wait_for_turn(self) -> None:
        context = self._context
        if self._takes_turns:
            context.keyless_turns.add(self, self.address, goes_first=self._is_new)
        else:
            context.client_turns.add(self)

    def take_turn(self) -> None:
        """Parse what waits."""
        contain(self.fail, self._resume_parsing)

    def _resume_parsing(self) -> None:
        """Parse the data that arrived while the previous request was being answered."""
        if self._busy or self._discarding or self.blocked or self.transport.is_closing():
            # The state has changed since this call was scheduled.
            return
        if self._reader.ready:
            self._dispatch()
            return
        self._handle_parse_outcome()
        if self._backlog and not self._discarding:
            backlog = b"".join(self._backlog)
            self._backlog.clear()
            if not self.transport.is_reading():
                self._call_soon(self._resume_reading)
            self._feed(backlog)

    def _dispatch(self) -> None:
        request = self._reader.ready.pop(0)
        self._busy, self._receiving = True, False
        self._takes_turns, self._is_new = not self.has_settled, False
        self.keep_alive = request.keep_alive and request.http11
        self.chunked = request.http11
        size = len(request.body)
        is_counted = size > SMALL_BODY_BYTES or self._buffered_bytes or self._reader.ready
        if is_counted and not self._reserve_body(size):
            self.reject(RECEIVE_LIMIT_REACHED, request)
        else:
            contain(partial(self.fail, request), self._handler.handle, self, request)

    def _reserve_body(self, size: int) -> bool:
        """Reserve room for the body of a complete request until its answer is complete."""
        self._body_bytes = size if size > SMALL_BODY_BYTES else 0
        return self._update_buffered_bytes()

    def _handle_parse_outcome(self) -> None:
        """No complete request is left: reject the next one, or send `100 Continue`."""
        if self._reader.error is not None:
            self.reject(self._reader.error)
        elif self._reader.expects_continue:
            self._reader.expects_continue = False
            self.write(headers.CONTINUE_RESPONSE)

    def _send_last(self, response: bytes) -> None:
        """Send a response after which the connection is closed."""
        self.write(response)
        if self.transport.can_write_eof():
            self._write_batcher.flush()
            self.transport.write_eof()
        self._set_deadline(LINGERING_CLOSE_S)

    def _discard(self, count: int) -> None:
        """Count discarded data of a rejected client; pause reading above the limit."""
        context = self._context
        context.discarded_bytes += count
        if context.discarded_bytes > DISCARD_BYTES:
            self.transport.pause_reading()
            resume = partial(contain, self.fail, self._resume_discarding)
            asyncio.get_running_loop().call_later(DISCARD_PAUSE_S, resume)

    def _resume_discarding(self) -> None:
        if self.transport.is_closing():
            return
        self.transport.resume_reading()
        self._discard(0)

    def _become_idle(self) -> None:
        """No request is being answered: wait for one, or parse the buffered data soon."""
        now, reader = self._context.clock(), self._reader
        self._idle_since = self._request_started_at = now
        self._deadline = now + self._context.config.timeouts.keep_alive_s
        has_request = reader.ready or reader.error is not None or reader.expects_continue
        if (self._backlog or has_request) and not self.blocked:
            self._wait_for_turn()

    def _set_deadline(self, seconds: float) -> None:
        self._deadline = self._context.clock() + seconds
