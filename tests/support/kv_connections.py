"""Two ends of a KV connection in one process."""

import socket
from contextlib import ExitStack, closing

from cleave_worker.transfer.protocol import FramedConnection


class ConnectedPairs:
    """Makes connections, and closes them all."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def connect(self) -> tuple[FramedConnection, FramedConnection]:
        """(accepted, connected)."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            connected = FramedConnection(socket.create_connection(listener.getsockname(), 5))
            accepted = FramedConnection(listener.accept()[0])
        self._stack.enter_context(closing(connected))
        self._stack.enter_context(closing(accepted))
        return accepted, connected

    def close(self) -> None:
        """Close both ends of each."""
        self._stack.close()
