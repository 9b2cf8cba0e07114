"""The consumer side of pulls from a prefix cache: requests a lease, and checks that it lasted.

The scheduler of an engine requests the lease (`request_prefix`) and holds its connection. Its ranks
read the blocks (`KvClient.pull_prefix`), and each checks afterwards that they were leased until
then (`check_lease`).
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field

import msgspec

from cleave_worker.transfer.authentication import connect_authenticated
from cleave_worker.transfer.handoff import Handoff, RefusalReason, RefusedError
from cleave_worker.transfer.protocol import (
    FramedConnection,
    PrefixLease,
    PrefixLeaseCheck,
    PrefixLeaseState,
    PrefixRequest,
    send_request,
)

_CONNECT_TIMEOUT_S = 5.0
_RESPONSE_TIMEOUT_S = 10.0
"""Longer than a producer waits for the steps that still compute the blocks."""


class SourceAddress(msgspec.Struct, frozen=True):
    """An engine that probably has the beginning of a prompt, as the gateway names it."""

    engine_id: str
    """Its boot id."""
    host: str
    port: int
    key: str = ""
    """Of its ports for KV, for a proof; empty: it asks for none."""

    def __repr__(self) -> str:
        """Without the key, for logs."""
        return f"SourceAddress({self.engine_id}, {self.host}:{self.port})"


@dataclass(frozen=True, slots=True)
class LeasedPrefix:
    """Blocks that a prefix cache keeps for this engine."""

    source: SourceAddress
    lease: PrefixLease
    connection: FramedConnection = field(repr=False)

    def end(self) -> None:
        """End the lease. What was not read and checked yet must not be used."""
        self.connection.close()


@dataclass(frozen=True, slots=True)
class PrefixRead:
    """Blocks of a lease to read, for a rank."""

    source: SourceAddress
    lease: PrefixLease
    num_skipped: int
    """Of the leased blocks; this engine has them by now."""
    blocks: tuple[int, ...]
    """Local ones to fill with those that follow."""

    def build_handoff(self) -> Handoff:
        """Return a handoff that names the producer's ranks; `epoch` is the number of the lease."""
        source, lease = self.source, self.lease
        place = (lease.addresses, lease.shape, source.key)
        return Handoff(source.engine_id, "", lease.lease_id, "", 0, *place)


def request_prefix(source: SourceAddress, keys: Sequence[bytes]) -> LeasedPrefix:
    """Lease the leading blocks of `keys` that another engine has cached, perhaps none. Blocks for
    at most 25 s. Raises RefusedError."""
    address = (source.host, source.port)
    connection = connect_authenticated(address, source.key, _CONNECT_TIMEOUT_S)
    try:
        request = PrefixRequest(source.engine_id, tuple(keys))
        lease = send_request(connection, request, PrefixLease, _RESPONSE_TIMEOUT_S)
        if len(lease.blocks) > len(keys):
            raise RefusedError(RefusalReason.MALFORMED, "more blocks are leased than requested")
    except BaseException:
        connection.close()
        raise
    return LeasedPrefix(source, lease, connection)


def check_lease(source: SourceAddress, lease_id: int) -> None:
    """Check that a lease has lasted until now. Raises RefusedError, also when it has not."""
    address = (source.host, source.port)
    with closing(connect_authenticated(address, source.key, _CONNECT_TIMEOUT_S)) as connection:
        check = PrefixLeaseCheck(source.engine_id, lease_id)
        state = send_request(connection, check, PrefixLeaseState, _RESPONSE_TIMEOUT_S)
    if not state.is_leased:
        raise RefusedError(RefusalReason.LAPSED, "the lease ended before the blocks were read")
