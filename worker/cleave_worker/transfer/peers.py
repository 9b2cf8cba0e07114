"""The producer ranks that one consumer rank contacts for a handoff."""

from dataclasses import dataclass

from cleave_worker.transfer.handoff import Handoff, RefusalReason, RefusedError
from cleave_worker.transfer.memory import LayerRegion
from cleave_worker.transfer.server import RegisteredKv
from cleave_worker.transfer.sharding import ParallelShape, ShardSource, find_sources, slice_layers


@dataclass(frozen=True, slots=True)
class RemoteRank:
    """One rank of a producer."""

    boot_id: str
    shape: ParallelShape
    """Parallelism of its engine."""
    address: tuple[str, int]
    source: ShardSource
    """The part of its KV that this consumer rank needs."""


def find_remote_ranks(kv: RegisteredKv, handoff: Handoff) -> tuple[RemoteRank, ...]:
    """Return all ranks to contact, including those that are only notified that they are not read.

    Raises RefusedError when the handoff's parallelism is invalid.
    """
    shape, heads = handoff.shape, kv.layout.num_kv_heads
    fault = shape.find_fault(heads)
    if not fault and shape.num_ranks != len(handoff.addresses):
        fault = f"{len(handoff.addresses)} addresses for {shape.num_ranks} ranks"
    if fault:
        raise RefusedError(RefusalReason.LAYOUT, fault)
    return tuple(
        RemoteRank(handoff.boot_id, shape, handoff.addresses[source.rank], source)
        for source in find_sources(kv.shard.shape, kv.shard.rank, shape, heads)
    )


def select_local_layers(kv: RegisteredKv, rank: RemoteRank) -> tuple[LayerRegion, ...]:
    """Return the local layers that a remote rank's KV fills. Raises RefusedError."""
    if rank.source.part is None:
        return ()
    try:
        return slice_layers(kv.layers, kv.shard, rank.source.part, kv.layout.num_kv_heads)
    except ValueError as error:
        raise RefusedError(RefusalReason.LAYOUT, str(error)) from error
