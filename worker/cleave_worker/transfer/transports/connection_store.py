"""The store over which gloo and NCCL find the other end of a link, on a KV connection.

Used by `Rendezvous`. torch's own TCPStore is a server of its own, which authenticates no peer
and listens for as long as the link exists. Here two ends send their entries to each other over the
connection on which they have authenticated, and no port is opened.
"""

import time
from datetime import timedelta

from torch.distributed import Store

from cleave_worker.transfer.protocol import FramedConnection, StoreEntry
from cleave_worker.transfer.transport import LinkError


class ConnectionStore(Store):  # type: ignore[misc]
    """Entries of both ends. Only what gloo and NCCL need: `set`, `get` and `wait`."""

    def __init__(self, connection: FramedConnection, nonce: bytes, seconds: float) -> None:
        """`nonce`: of this link. `seconds`: for all entries together."""
        super().__init__()
        self._connection = connection
        self._nonce = nonce
        self._deadline = time.monotonic() + seconds
        self._entries: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Set an entry at both ends. Raises LinkError."""
        entry = value.encode() if isinstance(value, str) else bytes(value)
        self._entries[key] = entry
        try:
            self._connection.send(StoreEntry(self._nonce, key, entry), self._get_remaining_s())
        except OSError as error:
            raise LinkError(f"the peer was lost: {error}") from error

    def get(self, key: str) -> bytes:
        """Wait for an entry of either end. Raises LinkError when it does not come in time."""
        while key not in self._entries:
            self._receive()
        return self._entries[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002
        """Wait for entries. Raises LinkError when they do not come in time."""
        for key in keys:
            self.get(key)

    def _receive(self) -> None:
        try:
            message = self._connection.receive(self._get_remaining_s())
        except OSError as error:
            raise LinkError(f"the peer was lost: {error}") from error
        if not isinstance(message, StoreEntry):
            self._connection.return_message(message)
            raise LinkError("the peer has given up the link")
        # Entries of an earlier link may still arrive.
        if message.nonce == self._nonce:
            self._entries[message.key] = message.value

    def _get_remaining_s(self) -> float:
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise LinkError("the peer did not come in time")
        return remaining
