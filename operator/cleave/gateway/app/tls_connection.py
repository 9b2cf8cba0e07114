"""The TLS of one client: decrypts what comes and encrypts what goes.

Created by the event loop for each connection to the HTTPS port. During the handshake it stands for
the client; afterwards it is the transport of a ClientConnection. The event loop has TLS of its own,
but with 47 KiB for an idle connection, and 300 KiB for one that has sent much: it keeps a buffer of
256 KiB for each, and OpenSSL's buffers stay as large as the largest piece that was in them. So all
pieces are small here, and nothing is made before the client has sent its first byte.

What is hard: what a client sends may be thousands of records of a byte each, so a turn of the event
loop reads few bytes. And OpenSSL allocates what a client declares, and answers some messages by
itself, also when the client reads none of its answers.
"""

import asyncio
import contextlib
import hashlib
import ssl
from collections.abc import Callable
from typing import Any, cast

from cleave.gateway.app.client_connection import CONNECTION_BYTES, ClientConnection
from cleave.gateway.context import GatewayContext
from cleave.gateway.event_loop_faults import contain
from cleave.gateway.http.address_debts import EXPECTED_S
from cleave.gateway.http.connection_limiter import get_address_group
from cleave.gateway.tls import TlsCertificate

HANDSHAKE_S = 10.0
"""From the connection to the end of the handshake."""
HANDSHAKE_BYTES = 48 << 10
"""Memory of a handshake that waits for the client."""
TLS_BYTES = 44 << 10
"""Memory of a connection: 21 KiB, and as much again while a record is incomplete."""
PIECE_BYTES = 4 << 10
"""OpenSSL's buffers get as large as the pieces."""
WAITING_BYTES = CONNECTION_BYTES + PIECE_BYTES
"""Memory of a handshake that waits for its first turn."""
TURN_BYTES = 16 << 10
"""Read and decrypted in one turn of the event loop."""
RECORD_BYTES = 16 << 10
"""Content of a record at most."""
FIRST_BYTES = 9
"""Type, version and length of a record; type and length of its message."""
FIRST_TYPES = 0x16, 0x01
"""Of a record of the handshake, and of the client's first message."""
FIRST_MESSAGE_BYTES = 16 << 10
"""Of the client's first message. OpenSSL would allocate what a client declares, up to 128 KiB."""
RETRY_BYTES = HANDSHAKE_BYTES + (176 << 10)
"""Memory of a handshake whose client may send another first message, of any declared length."""
RETRY_RANDOM = hashlib.sha256(b"HelloRetryRequest").digest()
"""The answer that calls for it has this instead of random bytes (RFC 8446, 4.1.3), ..."""
RANDOM_PLACE = slice(11, 43)
"""... here."""

_READ_BUFFER = memoryview(bytearray(TURN_BYTES))
"""Of all connections: the event loop fills it, and it is decrypted at once."""
_NO_BUFFER = ssl.MemoryBIO()


class TlsConnection(asyncio.BufferedProtocol, asyncio.Transport):
    """One connection to the HTTPS port."""

    def __init__(
        self,
        context: GatewayContext,
        certificate: TlsCertificate,
        make_client: Callable[[], ClientConnection],
    ) -> None:
        """`make_client`: makes the protocol that takes over after the handshake."""
        super().__init__()
        self._context = context
        self._certificate = certificate
        self._make_client = make_client
        self._client: ClientConnection | None = None
        """None during the handshake."""
        self._transport: asyncio.Transport
        self._tls: ssl.SSLObject | None = None
        """None until the client has begun its first message."""
        self._incoming = self._outgoing = _NO_BUFFER
        self._handshake_bytes = b""
        """Bytes of the handshake that have not been handled."""
        self._is_paused = self._has_sent_end = self._has_reserved = self._waits_for_turn = False
        self._started_at = context.clock()

    # --- what the event loop calls ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection; nothing else is needed before its first byte."""
        self._transport = cast("asyncio.Transport", transport)
        contain(self.fail, self._enter)

    def _enter(self) -> None:
        transport = self._transport
        context = self._context
        peer = transport.get_extra_info("peername")
        address = self._address = get_address_group(peer)
        if context.address_debts.has_credit(address):
            # Each counts by itself: a client that connects often takes more than each of thousands.
            address = str(peer)
        context.clients.add(self)
        context.address_debts.expect_request(self._address)
        if not (
            context.handshake_limiter.admit(self, address, CONNECTION_BYTES)
            and context.client_limiter.admit(self, address, CONNECTION_BYTES)
        ):
            self.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the event loop puts what comes."""
        del sizehint
        if self._client is not None:
            return _READ_BUFFER
        return _READ_BUFFER[: PIECE_BYTES - len(self._handshake_bytes)]

    def buffer_updated(self, nbytes: int) -> None:
        """Decrypt what has come, and give it to the client."""
        encrypted = _READ_BUFFER[:nbytes]
        if self._client is None:
            self._wait_for_turn(encrypted)
            return
        if nbytes == TURN_BYTES:
            # The event loop would read on, up to 32 times in a row.
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(contain, self.fail, self._resume_transport)
        if not self._has_sent_end:
            self._read_records(encrypted)
        else:
            # Which only counts what it discards.
            self._client.data_received(bytes(encrypted))

    def eof_received(self) -> None:
        """A client that has closed its sending side counts as gone."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection was closed by either side."""
        self._end_handshake()
        self._context.handshake_turns.remove(self, self._address)
        client, self._client = self._client, None
        self._tls, self._handshake_bytes = None, b""
        if client is not None:
            client.connection_lost(exc)

    def pause_writing(self) -> None:
        """The write buffer is full."""
        if self._client is not None:
            self._client.pause_writing()

    def resume_writing(self) -> None:
        """The write buffer has room again."""
        if self._client is not None:
            self._client.resume_writing()

    # --- during the handshake: what the turns, the limiters and the sweeper call ---

    def take_turn(self) -> None:
        """Handle what has come."""
        self._waits_for_turn = False
        encrypted, self._handshake_bytes = memoryview(self._handshake_bytes), b""
        if self.is_closing():
            return
        if self._tls is None and not self._begin():
            self.abort()
            return
        self._read_records(encrypted)
        self._resume_transport()

    def get_idle_since(self) -> float:
        """Since it was opened, because it has not sent a request."""
        return self._started_at

    def is_expected(self) -> bool:
        """Whether it has begun a moment ago, and its address has credit."""
        context = self._context
        is_new = self._tls is not None and context.clock() < self._started_at + EXPECTED_S
        return is_new and context.address_debts.has_credit(self._address)

    def is_receiving(self) -> bool:
        """No part of a request has come."""
        return False

    def check_deadline(self, now: float) -> None:
        """Close when the handshake takes too long."""
        if now > self._started_at + HANDSHAKE_S:
            self.abort()

    def close_if_idle(self) -> None:
        """The gateway stops: close."""
        self.abort()

    def drop(self) -> None:
        """Close at once."""
        self.abort()

    def fail(self) -> None:
        """Close after a fault of this program."""
        self.abort()

    # --- the transport of the client ---

    def get_extra_info(self, name: str, default: Any = None) -> Any:  # noqa: ANN401 - as asyncio
        """As the transport below, and the memory that the connection takes."""
        return TLS_BYTES if name == "weight" else self._transport.get_extra_info(name, default)

    def is_closing(self) -> bool:
        """Whether it is closing or closed."""
        return self._transport.is_closing()

    def is_reading(self) -> bool:
        """Whether the client gets what comes."""
        return not self._is_paused

    def pause_reading(self) -> None:
        """Give the client nothing until `resume_reading`."""
        self._is_paused = True
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Give the client what comes."""
        self._is_paused = False
        self._resume_transport()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Of the encrypted bytes."""
        self._transport.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        """Encrypted bytes that the kernel has not taken."""
        return self._transport.get_write_buffer_size()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt and send."""
        tls = self._tls
        if tls is None or self._has_sent_end or self.is_closing():
            return
        view, parts = memoryview(data), []
        try:
            while view:
                # It writes one record, which may be short: clients may limit their length.
                view = view[tls.write(view[:PIECE_BYTES]) :]
                parts.append(self._outgoing.read())
        except ssl.SSLError:
            self.abort()
            return
        self._transport.write(b"".join(parts))

    def can_write_eof(self) -> bool:
        """It can: TLS has an alert for that."""
        return True

    def write_eof(self) -> None:
        """Send no more. What still comes is not decrypted."""
        self._send_end()
        if not self.is_closing():
            self._transport.write_eof()

    def close(self) -> None:
        """Close after all that was written."""
        self._send_end()
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    # --- inside ---

    def _resume_transport(self) -> None:
        if not (self._is_paused or self.is_closing()):
            self._transport.resume_reading()

    def _wait_for_turn(self, encrypted: memoryview) -> None:
        """Keep bytes of the handshake until its turn."""
        self._handshake_bytes += encrypted
        has_first = self._tls is not None or len(self._handshake_bytes) >= FIRST_BYTES
        if self._has_sent_end or not has_first:
            return
        if not self._has_reserved:
            self._has_reserved = True
            is_first = _is_first_message(memoryview(self._handshake_bytes))
            if not (is_first and self._reserve(WAITING_BYTES)):
                self.abort()
                return
        if len(self._handshake_bytes) >= PIECE_BYTES:
            # Otherwise it reads on, so that clients that have gone take no turn.
            self._transport.pause_reading()
        if not self._waits_for_turn:
            self._waits_for_turn = True
            turns, has_begun = self._context.handshake_turns, self._tls is not None
            turns.add(self, self._address, goes_first=has_begun)

    def _read_records(self, encrypted: memoryview) -> None:
        content: list[bytes] = []
        is_established, is_over = self._client is not None, False
        try:
            for start in range(0, len(encrypted), PIECE_BYTES):
                if not self._take(encrypted[start : start + PIECE_BYTES], content):
                    is_over = True
                    break
        except ssl.SSLError:
            # No TLS, a version of it that is not supported, or damaged.
            is_over = True
        if self._outgoing.pending:
            answer = self._outgoing.read()
            self._transport.write(answer)
            if not is_established and answer[RANDOM_PLACE] == RETRY_RANDOM:
                is_over = not self._reserve(RETRY_BYTES)
            # Of attempts to renegotiate, and of new keys, there may be any number.
            if is_established and self._transport.get_write_buffer_size() > TURN_BYTES:
                is_over = True
        if content and self._client is not None and not self.is_closing():
            self._client.data_received(b"".join(content))
        if is_over:
            self.close()

    def _take(self, piece: memoryview, content: list[bytes]) -> bool:
        """Decrypt a piece, and append what it contains; False: the client sends no more.
        Raises SSLError."""
        tls = cast("ssl.SSLObject", self._tls)
        self._incoming.write(piece)
        try:
            if self._client is None:
                tls.do_handshake()
                self._finish_handshake()
            while self._incoming.pending or tls.pending():
                data = tls.read(RECORD_BYTES)
                if not data:
                    return False
                content.append(data)
        except ssl.SSLWantReadError:
            pass
        return True

    def _begin(self) -> bool:
        """Begin the handshake; False: there is no room for it."""
        if not self._reserve(HANDSHAKE_BYTES):
            return False
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = self._certificate.context
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        return True

    def _reserve(self, weight: int) -> bool:
        """Count so many bytes for the handshake; False: there is no room for them."""
        context = self._context
        is_known = context.address_debts.has_credit(self._address)
        limiters = context.handshake_limiter, context.client_limiter
        return all(each.update_weight(self, weight, is_known=is_known) for each in limiters)

    def _finish_handshake(self) -> None:
        self._end_handshake()
        self._client = self._make_client()
        self._client.connection_made(self)

    def _end_handshake(self) -> None:
        context = self._context
        if self not in context.clients:
            return
        context.clients.remove(self)
        context.address_debts.forget(self._address)
        context.handshake_limiter.remove(self)
        context.client_limiter.remove(self)

    def _send_end(self) -> None:
        """Tell the client that no more comes."""
        if self._tls is None or self._has_sent_end or self.is_closing():
            return
        self._has_sent_end = True
        # The client's own alert has not come, or the handshake is not over.
        with contextlib.suppress(ssl.SSLError):
            self._tls.unwrap()
        self._transport.write(self._outgoing.read())


def _is_first_message(begin: memoryview) -> bool:
    types = begin[0], begin[5]
    return types == FIRST_TYPES and int.from_bytes(begin[6:9]) <= FIRST_MESSAGE_BYTES
