"""The connections of the webhook's port: a limited number, of which the silent ones end first.

Started by `cleave.controller.webhook.server`. Anyone who reaches the port can open connections, and
each one takes memory from the first byte of its TLS handshake. So a new one takes the place of the
oldest that has no request, also while its handshake lasts: the API server's requests are answered
as long as fewer than MAX_CONNECTIONS others are opened during one of them.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from aiohttp import web

log = logging.getLogger("cleave.webhook")

MAX_CONNECTIONS = 64
"""asyncio keeps about 280 KiB for each one with TLS. API servers need a few."""
HANDSHAKE_S = 5.0
_BACKLOG = 128
_PAUSE_S = 0.1
"""After an error of accept, such as too many open files."""


@dataclass(slots=True, eq=False)
class _Connection:
    """One connection, from its first byte."""

    protocol: web.RequestHandler
    handshake: asyncio.Task[Any]
    is_busy: bool = False
    """Whether it has a request with a complete head."""

    @property
    def is_open(self) -> bool:
        return not self.handshake.done() or self.protocol.transport is not None

    def abort(self) -> None:
        self.handshake.cancel()
        if self.protocol.transport is not None:
            self.protocol.transport.abort()


class WebhookConnections:
    """Accepts connections for a server."""

    def __init__(self, server: web.Server, context: ssl.SSLContext) -> None:
        self._server, self._context = server, context
        self._connections: dict[web.RequestHandler, _Connection] = {}
        """Oldest first."""

    async def accept(self, listening: socket.socket) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listening)
            except OSError as error:
                log.warning("a connection is not accepted: %s", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            self._make_room()
            self._start(accepted)

    @contextlib.contextmanager
    def keep(self, protocol: web.RequestHandler) -> Iterator[None]:
        """Keep a connection while its request is handled."""
        connection = self._connections.get(protocol)
        if connection is not None:
            connection.is_busy = True
        try:
            yield
        finally:
            if connection is not None:
                connection.is_busy = False

    def close(self) -> None:
        """End all connections."""
        for connection in self._connections.values():
            connection.abort()
        self._connections.clear()

    def _start(self, accepted: socket.socket) -> None:
        protocol = self._server()
        handshake = asyncio.get_running_loop().connect_accepted_socket(
            lambda: protocol, accepted, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_S
        )
        task = asyncio.create_task(handshake)
        task.add_done_callback(_ignore_failure)
        self._connections[protocol] = _Connection(protocol, task)

    def _make_room(self) -> None:
        self._connections = {
            protocol: each for protocol, each in self._connections.items() if each.is_open
        }
        if len(self._connections) < MAX_CONNECTIONS:
            return
        silent = (each for each in self._connections.values() if not each.is_busy)
        oldest = next(silent, None) or next(iter(self._connections.values()))
        oldest.abort()
        del self._connections[oldest.protocol]


def _ignore_failure(handshake: asyncio.Task[Any]) -> None:
    """A handshake that fails is the client's business."""
    if not handshake.cancelled():
        handshake.exception()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    listening.setblocking(False)
    return listening
