"""The producer side of pulls from a prefix cache: leases blocks by the keys of the cache.

Runs in the process of an engine's scheduler, which knows the blocks; the ranks (`KvServer`) send
them. Each lease is one connection: it ends when the consumer closes the connection, dies, or holds
it for too long. So no lease outlives its consumer, and a consumer that hangs pins memory for a
bounded time.
"""

import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from cleave_worker.transfer.authentication import authenticate_consumer, compute_blocks_mac
from cleave_worker.transfer.handoff import RefusalReason
from cleave_worker.transfer.listener import Listener
from cleave_worker.transfer.protocol import (
    ErrorResponse,
    FramedConnection,
    Message,
    PrefixLease,
    PrefixLeaseCheck,
    PrefixLeaseState,
    PrefixRequest,
    ProtocolError,
)
from cleave_worker.transfer.sharding import ParallelShape

_MESSAGE_TIMEOUT_S = 10.0


class PrefixCache(Protocol):
    """The prefix cache of the engine; called from any thread."""

    def acquire(self, keys: Sequence[bytes]) -> tuple[int, ...]:
        """Return the cached ones of the leading blocks. They keep their content, which is complete,
        until they are released."""

    def release(self, blocks: Sequence[int]) -> None:
        """Let the engine evict the blocks again."""


@dataclass(frozen=True, slots=True)
class PrefixOffer:
    """What consumers learn of the engine that they pull from."""

    boot_id: str
    shape: ParallelShape
    addresses: tuple[tuple[str, int], ...]
    """(host, port) of each rank."""
    secret: str = field(repr=False)
    """Shared with the ranks, see `compute_blocks_mac`."""
    key: str = field(default="", repr=False)
    """What consumers must prove to have; empty: all are accepted."""


class PrefixServer:
    """Leases cached blocks until it is closed."""

    def __init__(
        self, host: str, port: int, offer: PrefixOffer, cache: PrefixCache, lease_s: float
    ) -> None:
        """Listen on `port`, or on a free port if it is 0. `lease_s`: longest time of a lease.
        Raises OSError when the port is taken."""
        self._offer = offer
        self._cache = cache
        self._lease_s = lease_s
        self._lease_ids = itertools.count(1)
        self._leased: set[int] = set()
        self._listener = Listener(host, port, self._serve)
        self.port = self._listener.port
        self._listener.start()

    def close(self) -> None:
        """Stop listening and end all leases."""
        self._listener.close()

    def _serve(self, connection: FramedConnection) -> None:
        # A consumer that is lost or breaks the protocol gets no response.
        with suppress(ProtocolError, TimeoutError):
            if self._offer.key:
                authenticate_consumer(connection, self._offer.key)
            message = connection.receive(_MESSAGE_TIMEOUT_S)
            if isinstance(message, PrefixLeaseCheck):
                is_leased = self._is_own(message.boot_id) and message.lease_id in self._leased
                connection.send(PrefixLeaseState(is_leased), _MESSAGE_TIMEOUT_S)
            elif isinstance(message, PrefixRequest):
                self._listener.mark_known(connection)
                self._grant_lease(connection, message)

    def _grant_lease(self, connection: FramedConnection, request: PrefixRequest) -> None:
        offer = self._offer
        if not self._is_own(request.boot_id):
            fault: Message = ErrorResponse(RefusalReason.BOOT, f"this is boot {offer.boot_id}")
            connection.send(fault, _MESSAGE_TIMEOUT_S)
            return
        blocks = self._cache.acquire(request.keys)
        lease_id = next(self._lease_ids)
        self._leased.add(lease_id)
        try:
            mac = compute_blocks_mac(offer.secret, blocks)
            lease = PrefixLease(lease_id, blocks, mac, offer.shape, offer.addresses)
            connection.send(lease, _MESSAGE_TIMEOUT_S)
            if blocks:
                # Returns or raises when the consumer closes the connection, or the time is over.
                connection.receive(self._lease_s)
        finally:
            # In this order: a lease that is confirmed still has its blocks.
            self._leased.discard(lease_id)
            self._cache.release(blocks)

    def _is_own(self, boot_id: str) -> bool:
        return boot_id == self._offer.boot_id
