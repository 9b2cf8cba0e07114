"""Memory that KV lies in, as regions of bytes, and the spans of it that a transfer moves.

Engines register their KV once; links copy spans of it. What is hard: blocks of one request lie
scattered, but often beside each other, and a copy that is larger costs less: spans that continue
each other on both sides are moved as one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a region."""

    region: int
    offset: int
    length: int

    @property
    def end(self) -> int:
        """Offset of the first byte behind it."""
        return self.offset + self.length

    def continued_by(self, other: "Span") -> bool:
        """Whether `other` begins where this one ends."""
        return self.region == other.region and self.end == other.offset


@dataclass(frozen=True, slots=True)
class Move:
    """One copy: as many bytes there as here."""

    remote: Span
    local: Span


@dataclass(frozen=True, slots=True)
class Plane:
    """Where one layer keeps its blocks: block `b` at `offset + b * stride` of a region."""

    region: int
    offset: int
    stride: int
    block_bytes: int

    def span(self, block: int) -> Span:
        """The bytes of one block."""
        return Span(self.region, self.offset + block * self.stride, self.block_bytes)


def moves(
    theirs: Sequence[Plane],
    their_blocks: Sequence[int],
    ours: Sequence[Plane],
    our_blocks: Sequence[int],
) -> list[Move]:
    """The fewest copies that bring their blocks, plane by plane, to our blocks.

    Raises ValueError when planes or blocks do not match in number or size.
    """
    if len(theirs) != len(ours) or len(their_blocks) != len(our_blocks):
        raise ValueError(
            f"{len(theirs)} planes and {len(their_blocks)} blocks there, "
            f"{len(ours)} and {len(our_blocks)} here: they must match"
        )
    pairs = list(zip(their_blocks, our_blocks, strict=True))
    single = [
        Move(plane.span(there), own.span(here))
        for plane, own in zip(theirs, ours, strict=True)
        for there, here in pairs
    ]
    if any(move.remote.length != move.local.length for move in single):
        raise ValueError("blocks there and here differ in size: they must match")
    return merged(single)


def merged(single: Iterable[Move]) -> list[Move]:
    """Neighbours that continue each other on both sides, as one copy each."""
    found: list[Move] = []
    for move in single:
        last = found[-1] if found else None
        if last and last.remote.continued_by(move.remote) and last.local.continued_by(move.local):
            found[-1] = Move(_longer(last.remote, move.remote), _longer(last.local, move.local))
        else:
            found.append(move)
    return found


def spans_of(planes: Sequence[Plane], blocks: Sequence[int]) -> list[Span]:
    """Bytes of blocks in the order in which `moves` takes them, neighbours joined."""
    found: list[Span] = []
    for plane in planes:
        for block in blocks:
            span = plane.span(block)
            if found and found[-1].continued_by(span):
                found[-1] = _longer(found[-1], span)
            else:
                found.append(span)
    return found


def _longer(span: Span, following: Span) -> Span:
    return Span(span.region, span.offset, span.length + following.length)


class Memory:
    """Registered regions: flat tensors of bytes, on the host or on a GPU."""

    def __init__(self, regions: Sequence[torch.Tensor]) -> None:
        for region in regions:
            if region.dtype is not torch.uint8 or region.dim() != 1:
                raise ValueError("a region must be a flat tensor of bytes")
        self.regions = tuple(regions)

    def view(self, span: Span) -> torch.Tensor:
        """The bytes of a span. Raises ValueError when it does not lie inside its region."""
        if not 0 <= span.region < len(self.regions):
            raise ValueError(f"region {span.region} of {len(self.regions)} is not registered")
        region = self.regions[span.region]
        if span.offset < 0 or span.length < 0 or span.end > region.numel():
            raise ValueError(f"span {span.offset}..{span.end} leaves region {span.region}")
        return region[span.offset : span.end]


def register(tensors: Iterable[torch.Tensor], num_blocks: int) -> tuple[Memory, list[Plane]]:
    """KV caches, one tensor per layer with blocks first, as regions and planes.

    Layers that share one allocation share a region. Raises ValueError when a layer's blocks are
    not contiguous: then no span describes one.
    """
    regions: dict[int, int] = {}
    flat: list[torch.Tensor] = []
    planes: list[Plane] = []
    for tensor in tensors:
        if tensor.dim() < 2 or tensor.shape[0] < num_blocks or not tensor[0].is_contiguous():
            raise ValueError(f"a KV cache of shape {tuple(tensor.shape)} has no contiguous blocks")
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in regions:
            regions[address] = len(flat)
            flat.append(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
        size = tensor.element_size()
        planes.append(
            Plane(
                regions[address],
                tensor.storage_offset() * size,
                tensor.stride(0) * size,
                tensor[0].numel() * size,
            )
        )
    return Memory(flat), planes
