"""Memory that KV lies in, as regions of bytes, and the spans of it that a transfer moves.

Engines register their KV once; links copy spans of it. What is hard: blocks of one request lie
scattered, but often beside each other, and a copy that is larger costs less: spans that continue
each other on both sides are moved as one.
"""

import ctypes
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Span(NamedTuple):
    """Bytes of a region."""

    region: int
    offset: int
    length: int


class Move(NamedTuple):
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

    def span(self, block: int, count: int = 1) -> Span:
        """The bytes of blocks that follow each other."""
        return Span(self.region, self.offset + block * self.stride, self.block_bytes * count)

    def part(self, first: int, count: int, of: int) -> "Plane":
        """The same plane with `count` of the `of` equal parts of each block, from the first on."""
        size = self.block_bytes // of
        return Plane(self.region, self.offset + first * size, self.stride, count * size)

    @property
    def is_dense(self) -> bool:
        """Whether there is nothing between a block and the next."""
        return self.stride == self.block_bytes


class _Run(NamedTuple):
    there: int
    here: int
    length: int


def moves(
    theirs: Sequence[Plane],
    their_blocks: Sequence[int],
    ours: Sequence[Plane],
    our_blocks: Sequence[int],
) -> Iterator[Move]:
    """The fewest copies that bring their blocks, plane by plane, to our blocks.

    One at a time: a long prompt has 100,000 of them, and a list would cost more than the bytes.
    Raises ValueError when planes or blocks do not match in number or size.
    """
    if len(theirs) != len(ours) or len(their_blocks) != len(our_blocks):
        raise ValueError(
            f"{len(theirs)} planes and {len(their_blocks)} blocks there, "
            f"{len(ours)} and {len(our_blocks)} here: they must match"
        )
    planes = list(zip(theirs, ours, strict=True))
    if any(plane.block_bytes != own.block_bytes for plane, own in planes):
        raise ValueError("blocks there and here differ in size: they must match")
    single = [_Run(*pair, 1) for pair in zip(their_blocks, our_blocks, strict=True)]
    joined = _join(single)
    return (
        Move(plane.span(there, length), own.span(here, length))
        for plane, own in planes
        for there, here, length in (joined if plane.is_dense and own.is_dense else single)
    )


def spans_of(planes: Sequence[Plane], blocks: Sequence[int]) -> Iterator[Span]:
    """Bytes of blocks in the order in which `moves` takes them, neighbours joined."""
    single = [_Run(block, block, 1) for block in blocks]
    joined = _join(single)
    return (
        plane.span(block, length)
        for plane in planes
        for block, _, length in (joined if plane.is_dense else single)
    )


def pieces(spans: Iterable[Span], size: int) -> Iterator[list[Span]]:
    """Spans cut and grouped so that each group but the last fills a buffer of this size.

    Spans of the same lengths are cut alike, wherever they lie.
    """
    piece: list[Span] = []
    room = size
    for span in spans:
        at, end = span.offset, span.offset + span.length
        while at < end:
            length = min(room, end - at)
            piece.append(Span(span.region, at, length))
            at += length
            room -= length
            if not room:
                yield piece
                piece, room = [], size
    if piece:
        yield piece


def packed(piece: Sequence[Span], start: int = 0) -> list[Span]:
    """Where the spans of a piece lie in a buffer, one behind the other."""
    starts = itertools.accumulate((span.length for span in piece), initial=start)
    return [Span(0, at, span.length) for at, span in zip(starts, piece, strict=False)]


def _join(single: Iterable[_Run]) -> list[_Run]:
    """Blocks that continue each other on both sides, as one run each."""
    found: list[_Run] = []
    for run in single:
        last = found[-1] if found else None
        if last and (last.there + last.length, last.here + last.length) == (run.there, run.here):
            found[-1] = _Run(last.there, last.here, last.length + 1)
        else:
            found.append(run)
    return found


class Memory:
    """Registered regions: flat tensors of bytes, on the host or on a GPU."""

    def __init__(self, regions: Sequence[torch.Tensor]) -> None:
        for region in regions:
            if region.dtype is not torch.uint8 or region.dim() != 1:
                raise ValueError("a region must be a flat tensor of bytes")
        self.regions = tuple(regions)
        self._sizes = [region.numel() for region in regions]
        self._is_host = all(region.device.type == "cpu" for region in regions)

    def view(self, span: Span) -> torch.Tensor:
        """The bytes of a span. Raises ValueError when it does not lie inside its region."""
        self._check(span)
        return self.regions[span.region][span.offset : span.offset + span.length]

    def fill(self, source: "Memory", pairs: Iterable[tuple[Span, Span]]) -> None:
        """Copy bytes of `source` into own spans: (own span, span there) each.

        Raises ValueError at the first pair that is not there, with all before it copied.
        """
        if not (self._is_host and source._is_host):
            for own, there in pairs:
                self.view(own).copy_(source.view(there))
            return
        # A tenth of what two views and a copy of tensors cost; many spans are small.
        copy, sizes, their_sizes = ctypes.memmove, self._sizes, source._sizes
        # Asked each time: sharing moves regions.
        starts = [region.data_ptr() for region in self.regions]
        their_starts = [region.data_ptr() for region in source.regions]
        for own, there in pairs:
            region, offset, length = own
            their_region, their_offset, their_length = there
            if (
                length != their_length
                or not 0 <= region < len(sizes)
                or not 0 <= their_region < len(their_sizes)
                or not 0 <= offset <= offset + length <= sizes[region]
                or not 0 <= their_offset <= their_offset + length <= their_sizes[their_region]
            ):
                self._check(own)
                source._check(there)
                raise ValueError(f"{their_length} bytes do not fill a span of {length}")
            copy(starts[region] + offset, their_starts[their_region] + their_offset, length)

    def _check(self, span: Span) -> None:
        region, offset, length = span
        if not 0 <= region < len(self._sizes):
            raise ValueError(f"region {region} of {len(self._sizes)} is not registered")
        if offset < 0 or length < 0 or offset + length > self._sizes[region]:
            raise ValueError(f"span {offset}..{offset + length} leaves region {region}")


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
