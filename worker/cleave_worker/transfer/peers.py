"""The producer ranks that one consumer rank contacts for a handoff."""

from dataclasses import dataclass

from cleave_worker.transfer.handoff import HandOff, Reason, RefusedError
from cleave_worker.transfer.memory import Plane
from cleave_worker.transfer.server import Kept
from cleave_worker.transfer.sharding import Shape, Source, cut, sources


@dataclass(frozen=True, slots=True)
class Peer:
    """One rank of a producer."""

    boot_id: str
    shape: Shape
    """Parallelism of its engine."""
    address: tuple[str, int]
    source: Source
    """What this consumer rank needs of it."""


def peers(kv: Kept, handoff: HandOff) -> tuple[Peer, ...]:
    """Return all ranks to contact, including those that only learn that they are not read.

    Raises RefusedError when the handoff's parallelism is invalid.
    """
    shape, heads = handoff.shape, kv.layout.num_kv_heads
    fault = shape.fault(heads)
    if not fault and shape.num_ranks != len(handoff.addresses):
        fault = f"{len(handoff.addresses)} addresses for {shape.num_ranks} ranks"
    if fault:
        raise RefusedError(Reason.LAYOUT, fault)
    return tuple(
        Peer(handoff.boot_id, shape, handoff.addresses[source.rank], source)
        for source in sources(kv.share.shape, kv.share.rank, shape, heads)
    )


def own_planes(kv: Kept, rank: Peer) -> tuple[Plane, ...]:
    """Return the local layers that a remote rank's KV fills. Raises RefusedError."""
    if rank.source.part is None:
        return ()
    try:
        return cut(kv.planes, kv.share, rank.source.part, kv.layout.num_kv_heads)
    except ValueError as error:
        raise RefusedError(Reason.LAYOUT, str(error)) from error
