"""A connection to the HTTPS port until TLS is set up; then a client's connection takes its place.

Made by the event loop for each connection to that port. The event loop could do the handshake by
itself, but would tell of connections only when it is done: until then they would count nowhere, and
any number of them could be opened, of which each takes fifty times what a plain one takes.
"""

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Callable
from typing import cast

from cleave.gateway.context import Context
from cleave.gateway.front.client import ClientConnection

HANDSHAKE_S = 10.0


class Handshake(asyncio.Protocol):
    """One of them."""

    def __init__(
        self,
        context: Context,
        certificate: ssl.SSLContext,
        make_client: Callable[[], ClientConnection],
    ) -> None:
        """`make_client`: what takes its place."""
        self._context = context
        self._certificate = certificate
        self._make_client = make_client
        self._task: asyncio.Task[None] | None = None
        self._begun_at = context.clock()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set up by the event loop, which would read at once: so the socket gets another one."""
        first = cast("asyncio.Transport", transport)
        # Without a file to be had, only this connection is lost.
        with contextlib.suppress(OSError):
            own = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
            self._begin(own, transport.get_extra_info("peername"))
        first.abort()

    def idle_since(self) -> float:
        """It has never sent a request."""
        return self._begun_at

    def sweep(self, now: float) -> None:
        """The handshake has a deadline of its own."""

    def close_if_idle(self) -> None:
        """The gateway ends."""
        self.drop()

    def drop(self) -> None:
        """Close at once."""
        if self._task is not None:
            self._task.cancel()

    def _begin(self, own: socket.socket, peer: object) -> None:
        if self._context.handshakes.admit(self, peer):
            self._context.clients.add(self)
            self._task = asyncio.get_running_loop().create_task(self._shake(own))
            self._task.add_done_callback(lambda _: self._end(own))
        else:
            own.close()

    async def _shake(self, own: socket.socket) -> None:
        own.setblocking(False)
        # Its peer may leave, or speak no TLS of ours.
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make_client,
                own,
                ssl=self._certificate,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=HANDSHAKE_S,
            )

    def _end(self, own: socket.socket) -> None:
        """Also when it was cancelled before it began; a transport in use keeps the socket open."""
        own.close()
        self._context.clients.discard(self)
        self._context.handshakes.leave(self)
