"""A connection to the HTTPS port during its TLS handshake, until a ClientConnection replaces it.

Created by the event loop for each connection to that port. The event loop could do the handshake
itself, but would report connections only afterwards. Until then no limit would count them, and any
number could be opened, each of which takes fifty times the memory of a plain one.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from ssl import SSLContext
from typing import cast

from cleave.gateway.app.client_connection import ClientConnection
from cleave.gateway.context import GatewayContext
from cleave.gateway.http.connection_limiter import get_address_group

HANDSHAKE_S = 10.0


class TlsHandshake(asyncio.Protocol):
    """One connection whose TLS handshake is in progress."""

    def __init__(
        self, context: GatewayContext, tls: SSLContext, make_client: Callable[[], ClientConnection]
    ) -> None:
        """`make_client`: makes the protocol that takes over after the handshake."""
        self._context = context
        self._tls = tls
        self._make_client = make_client
        self._task: asyncio.Task[None] | None = None
        self._started_at = context.clock()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Duplicate the socket, because the event loop would read from the first one at once."""
        first = cast("asyncio.Transport", transport)
        # If no file descriptor is left, only this connection is lost.
        with contextlib.suppress(OSError):
            duplicate = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
            self._start(duplicate, transport.get_extra_info("peername"))
        first.abort()

    def get_idle_since(self) -> float:
        """Since it was opened, because it has not sent a request."""
        return self._started_at

    def check_deadline(self, now: float) -> None:
        """Nothing to do: asyncio limits the time of the handshake."""

    def close_if_idle(self) -> None:
        """The gateway stops: close."""
        self.drop()

    def drop(self) -> None:
        """Close at once."""
        if self._task is not None:
            self._task.cancel()

    def _start(self, connection: socket.socket, peer: object) -> None:
        if self._context.handshake_limiter.admit(self, get_address_group(peer)):
            self._context.clients.add(self)
            self._task = asyncio.get_running_loop().create_task(self._run_handshake(connection))
            self._task.add_done_callback(lambda _: self._close(connection))
        else:
            connection.close()

    async def _run_handshake(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        # The peer may disconnect, or not speak a supported version of TLS.
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make_client,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=HANDSHAKE_S,
            )

    def _close(self, connection: socket.socket) -> None:
        """Also called for a task that never began; a transport in use keeps the socket open."""
        connection.close()
        self._context.clients.discard(self)
        self._context.handshake_limiter.remove(self)
