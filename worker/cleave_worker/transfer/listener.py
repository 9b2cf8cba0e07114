"""A port whose connections are each served by a thread.

Used by the two servers of a KV transfer, `KvServer` and `PrefixServer`. Strangers may connect, too:
under pressure those that have not introduced themselves make room first.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable

from cleave_worker.transfer.protocol import FramedConnection

_log = logging.getLogger(__name__)
_MAX_CONSUMERS = 256
_ACCEPT_RETRY_S = 0.1


class Listener:
    """Accepts connections until it is closed."""

    def __init__(self, host: str, port: int, serve: Callable[[FramedConnection], None]) -> None:
        """Listen on `port`, or on a free port if it is 0; `start` accepts. `serve` runs in a thread
        of each connection, which is closed when it returns. Raises OSError when the port is
        taken."""
        self._listener = socket.create_server((host, port), backlog=128)
        self._serve = serve
        self.port: int = self._listener.getsockname()[1]
        self._connections: dict[FramedConnection, bool] = {}
        """Whether each one has introduced itself, oldest first."""
        self._closed = False

    def start(self) -> None:
        """Start to accept connections."""
        threading.Thread(target=self._accept, name="kv-server", daemon=True).start()

    def mark_known(self, connection: FramedConnection) -> None:
        """Record that a connection has proven its key and named this boot."""
        self._connections[connection] = True

    def close(self) -> None:
        """Stop listening and close all connections."""
        self._closed = True
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        finally:
            self._listener.close()
        for connection in list(self._connections):
            connection.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connected, _ = self._listener.accept()
            except OSError as error:
                if not self._closed:
                    # For instance out of file descriptors: wait until connections close.
                    _log.warning("cannot accept a KV consumer: %s", error)
                    time.sleep(_ACCEPT_RETRY_S)
                continue
            if len(self._connections) >= _MAX_CONSUMERS and not self._make_room():
                connected.close()
                continue
            connection = FramedConnection(connected)
            self._connections[connection] = False
            arguments = (connection,)
            threading.Thread(target=self._run, args=arguments, name="kv-serve", daemon=True).start()

    def _make_room(self) -> bool:
        """Close the oldest connection that has not introduced itself; False: all of them have."""
        for connection, is_known in tuple(self._connections.items()):
            if not is_known and self._connections.pop(connection, None) is not None:
                connection.close()
                return True
        return False

    def _run(self, connection: FramedConnection) -> None:
        try:
            self._serve(connection)
        finally:
            connection.close()
            self._connections.pop(connection, None)
