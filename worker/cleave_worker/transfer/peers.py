"""The ranks of an owner that one reading rank turns to, as a hand-off names them."""

from dataclasses import dataclass

from cleave_worker.transfer.identity import HandOff, Reason, RefusedError
from cleave_worker.transfer.memory import Plane
from cleave_worker.transfer.owner import Kept
from cleave_worker.transfer.shapes import Shape, Source, cut, sources


@dataclass(frozen=True, slots=True)
class Peer:
    """One rank."""

    boot_id: str
    shape: Shape
    """Of its engine."""
    address: tuple[str, int]
    source: Source
    """What is needed of it."""


def peers(kept: Kept, hand_off: HandOff) -> tuple[Peer, ...]:
    """All of them, those included that are only told that they are not wanted.

    Raises RefusedError when the hand-off's shape cannot be.
    """
    shape, heads = hand_off.shape, kept.layout.num_kv_heads
    fault = shape.fault(heads)
    if not fault and shape.num_ranks != len(hand_off.addresses):
        fault = f"{len(hand_off.addresses)} addresses for {shape.num_ranks} ranks"
    if fault:
        raise RefusedError(Reason.LAYOUT, fault)
    return tuple(
        Peer(hand_off.boot_id, shape, hand_off.addresses[source.rank], source)
        for source in sources(kept.share.shape, kept.share.rank, shape, heads)
    )


def own_planes(kept: Kept, peer: Peer) -> tuple[Plane, ...]:
    """Where what a peer has is to go. Raises RefusedError."""
    if peer.source.part is None:
        return ()
    try:
        return cut(kept.planes, kept.share, peer.source.part, kept.layout.num_kv_heads)
    except ValueError as error:
        raise RefusedError(Reason.LAYOUT, str(error)) from error
