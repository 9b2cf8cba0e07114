"""The memory that contains KV, as regions of bytes, and the byte ranges that a transfer copies.

An engine registers its KV cache once; links copy ranges of it. The blocks of a request are
scattered, but often adjacent, and one large copy costs less than many small ones. So blocks that
are adjacent at both ends are copied as one range.
"""

import ctypes
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

_WORD = torch.int64
"""Rows are copied in words: a kernel over bytes would be slower."""
_MIN_ROW_BYTES = 512
"""Shorter rows, of layouts that no engine has, are copied range by range."""
_Numbers = NDArray[np.int64]
_flatten = itertools.chain.from_iterable


class ByteRange(NamedTuple):
    """Bytes of a region."""

    region: int
    offset: int
    length: int


class RangeCopy(NamedTuple):
    """One copy between ranges of equal length."""

    remote: ByteRange
    local: ByteRange


@dataclass(frozen=True, slots=True)
class LayerRegion:
    """The blocks of one layer: block `b` lies at `offset + b * stride` of a region."""

    region: int
    offset: int
    stride: int
    block_bytes: int

    def get_range(self, block: int, count: int = 1) -> ByteRange:
        """Return the bytes of `count` adjacent blocks."""
        return ByteRange(self.region, self.offset + block * self.stride, self.block_bytes * count)

    def get_part(self, first: int, count: int, of: int) -> "LayerRegion":
        """Return this layer with `count` of `of` equal parts of each block, from `first` on."""
        size = self.block_bytes // of
        return LayerRegion(self.region, self.offset + first * size, self.stride, count * size)

    @property
    def is_contiguous(self) -> bool:
        """Whether blocks are adjacent without gaps."""
        return self.stride == self.block_bytes


class _BlockRun(NamedTuple):
    remote: int
    local: int
    length: int


def plan_copies(
    remote_layers: Sequence[LayerRegion],
    remote_blocks: Sequence[int],
    local_layers: Sequence[LayerRegion],
    local_blocks: Sequence[int],
) -> Iterator[RangeCopy]:
    """Yield the fewest copies from remote to local blocks, layer by layer.

    Lazy, as a long prompt has 100,000 copies and a list would cost more than the bytes. Raises
    ValueError when layers or blocks do not match in number or size.
    """
    if len(remote_layers) != len(local_layers) or len(remote_blocks) != len(local_blocks):
        raise ValueError(
            f"{len(remote_layers)} layers and {len(remote_blocks)} blocks at the producer, "
            f"{len(local_layers)} and {len(local_blocks)} at the consumer: they must match"
        )
    layers = list(zip(remote_layers, local_layers, strict=True))
    if any(remote.block_bytes != local.block_bytes for remote, local in layers):
        raise ValueError("blocks of producer and consumer differ in size: they must match")
    runs = [_BlockRun(*pair, 1) for pair in zip(remote_blocks, local_blocks, strict=True)]
    merged = _merge_runs(runs)
    return (
        RangeCopy(remote.get_range(remote_block, length), local.get_range(local_block, length))
        for remote, local in layers
        for remote_block, local_block, length in (
            merged if remote.is_contiguous and local.is_contiguous else runs
        )
    )


def list_ranges(layers: Sequence[LayerRegion], blocks: Sequence[int]) -> Iterator[ByteRange]:
    """Yield the bytes of blocks in the order of `plan_copies`, adjacent blocks merged."""
    runs = [_BlockRun(block, block, 1) for block in blocks]
    merged = _merge_runs(runs)
    return (
        layer.get_range(block, length)
        for layer in layers
        for block, _, length in (merged if layer.is_contiguous else runs)
    )


def chunk_ranges(ranges: Iterable[ByteRange], size: int) -> Iterator[list[ByteRange]]:
    """Cut and group ranges so that each group except the last fills a buffer of `size` bytes.
    Ranges of the same lengths are cut alike, wherever they lie."""
    group: list[ByteRange] = []
    free_bytes = size
    for range_ in ranges:
        at, end = range_.offset, range_.offset + range_.length
        while at < end:
            length = min(free_bytes, end - at)
            group.append(ByteRange(range_.region, at, length))
            at += length
            free_bytes -= length
            if not free_bytes:
                yield group
                group, free_bytes = [], size
    if group:
        yield group


def cut_copies(
    copies: Iterable[RangeCopy], size: int
) -> Iterator[tuple[_Numbers, _Numbers, _Numbers]]:
    """Cut copies into groups that each fill a buffer of `size` bytes, except the last. Yields for
    each group remote ranges, where they lie in the buffer, and local ranges, as rows of numbers."""
    numbers = _to_numbers(copies)
    numbers = numbers[numbers[:, 0, 2] > 0]
    lengths = numbers[:, 0, 2]
    ends = np.cumsum(lengths)
    starts, total = ends - lengths, int(lengths.sum())
    cuts = np.union1d(starts, np.arange(0, total, size))
    of = np.searchsorted(ends, cuts, side="right")
    pieces = numbers[of]
    pieces[:, :, 1] += (cuts - starts[of])[:, None]
    pieces[:, :, 2] = np.diff(cuts, append=total)[:, None]
    packed = np.stack((np.zeros_like(cuts), cuts % size, pieces[:, 0, 2]), axis=1)
    firsts = np.searchsorted(cuts, np.arange(0, total, size))
    for part in np.split(np.arange(len(cuts)), firsts[1:]) if total else ():
        yield pieces[part, 0], packed[part], pieces[part, 1]


def pack_ranges(group: Sequence[ByteRange], start: int = 0) -> list[ByteRange]:
    """Return where the ranges of a group lie in a buffer, packed from `start` on."""
    starts = itertools.accumulate((range_.length for range_ in group), initial=start)
    return [ByteRange(0, at, range_.length) for at, range_ in zip(starts, group, strict=False)]


def _merge_runs(runs: Iterable[_BlockRun]) -> list[_BlockRun]:
    """Merge blocks that are adjacent at both ends into runs."""
    merged: list[_BlockRun] = []
    for run in runs:
        last = merged[-1] if merged else None
        if last and run[:2] == (last.remote + last.length, last.local + last.length):
            merged[-1] = _BlockRun(last.remote, last.local, last.length + 1)
        else:
            merged.append(run)
    return merged


class Memory:
    """Registered regions: flat byte tensors on the host or on a GPU."""

    def __init__(self, regions: Sequence[torch.Tensor]) -> None:
        for region in regions:
            if region.dtype is not torch.uint8 or region.dim() != 1:
                raise ValueError("a region must be a flat tensor of bytes")
        self.regions = tuple(regions)
        self._sizes = [region.numel() for region in regions]
        self.device = regions[0].device if regions else torch.device("cpu")
        self._is_host = all(region.device.type == "cpu" for region in regions)

    def view(self, range_: ByteRange) -> torch.Tensor:
        """Return the bytes of a range. Raises ValueError when it exceeds its region."""
        self._check(range_)
        return self.regions[range_.region][range_.offset : range_.offset + range_.length]

    def copy_to_host(self, range_: ByteRange) -> memoryview:
        """Return the bytes of a range on the host, which may be the registered ones."""
        return memoryview(self.view(range_).cpu().numpy())

    def copy_from(self, source: "Memory", pairs: Iterable[tuple[ByteRange, ByteRange]]) -> None:
        """Copy bytes of `source`: pairs of (own range, range of `source`).

        On a GPU this only enqueues. Raises ValueError for an invalid pair: on a GPU before anything
        is copied, see `copy_rows`; on the host after all pairs before it were copied.
        """
        if not (self._is_host and source._is_host):
            copy_rows(self, source, pairs)
            return
        # Costs a tenth of two views and a tensor copy; many ranges are small.
        copy, sizes, source_sizes = ctypes.memmove, self._sizes, source._sizes
        # Read on each call, as `share_memory` moves regions.
        starts = [region.data_ptr() for region in self.regions]
        source_starts = [region.data_ptr() for region in source.regions]
        for own, remote in pairs:
            region, offset, length = own
            source_region, source_offset, source_length = remote
            if (
                length != source_length
                or not 0 <= region < len(sizes)
                or not 0 <= source_region < len(source_sizes)
                or not 0 <= offset <= offset + length <= sizes[region]
                or not 0 <= source_offset <= source_offset + length <= source_sizes[source_region]
            ):
                self._check(own)
                source._check(remote)
                raise ValueError(f"{source_length} bytes do not fill a range of {length}")
            copy(starts[region] + offset, source_starts[source_region] + source_offset, length)

    def check_all(self, ranges: _Numbers) -> None:
        """Raises ValueError for the first of these rows (region, offset, length) that exceeds its
        region."""
        region, offset, length = ranges.T
        known = (region >= 0) & (region < len(self._sizes))
        sizes = np.array([*self._sizes, 0], np.int64)[np.where(known, region, -1)]
        faulty = ~known | (offset < 0) | (length < 0) | (offset + length > sizes)
        if faulty.any():
            self._check(ByteRange(*ranges[faulty][0].tolist()))

    def _check(self, range_: ByteRange) -> None:
        region, offset, length = range_
        if not 0 <= region < len(self._sizes):
            raise ValueError(f"region {region} of {len(self._sizes)} is not registered")
        if offset < 0 or length < 0 or offset + length > self._sizes[region]:
            raise ValueError(f"span {offset}..{offset + length} leaves region {region}")


def copy_rows(
    target: Memory, source: Memory, pairs: Iterable[tuple[ByteRange, ByteRange]] | _Numbers
) -> None:
    """Copy pairs of (range of `target`, range of `source`), or an array [pairs, 2, 3] of them, with
    few kernels: one or two for each run of pairs between the same two regions. `Memory.copy_from`
    calls it for KV on a GPU.

    A copy of its own costs each range 3 us of Python and torch before the launch, during which the
    model's thread cannot launch its kernels; a scattered prompt has thousands of ranges. So regions
    are viewed as rows whose length divides all offsets and lengths, and rows are gathered or
    scattered by index; rows below 512 bytes are not worth it, and such ranges are copied one by
    one. Works on the host, too. Raises ValueError, before anything is copied, when a pair is
    invalid or the two memories are on different devices.
    """
    if target.device != source.device:
        raise ValueError(
            f"cannot copy rows from {source.device} to {target.device}: they must be on one device"
        )
    numbers = pairs if isinstance(pairs, np.ndarray) else _to_numbers(pairs)
    for memory, ranges in ((target, numbers[:, 0]), (source, numbers[:, 1])):
        memory.check_all(ranges)
    if (numbers[:, 0, 2] != numbers[:, 1, 2]).any():
        raise ValueError("ranges of different lengths: they must match")
    numbers = numbers[numbers[:, 0, 2] > 0]
    regions = numbers[:, :, 0]
    ends = np.flatnonzero((regions[1:] != regions[:-1]).any(axis=1)) + 1
    for part in np.split(numbers, ends) if len(numbers) else ():
        own_region, remote_region = part[0, :, 0].tolist()
        copies = np.stack((part[:, 0, 1], part[:, 1, 1], part[:, 0, 2]), axis=1)
        _copy_region_rows(target.regions[own_region], source.regions[remote_region], copies)


def _to_numbers(pairs: Iterable[tuple[ByteRange, ByteRange]]) -> _Numbers:
    return np.fromiter(_flatten(_flatten(pairs)), np.int64).reshape(-1, 2, 3)


def _copy_region_rows(target: torch.Tensor, source: torch.Tensor, copies: _Numbers) -> None:
    """`copies`: rows of (offset in `target`, offset in `source`, length)."""
    row_bytes = int(np.gcd.reduce(copies, axis=None))
    if row_bytes < _MIN_ROW_BYTES or row_bytes % _WORD.itemsize:
        for own, remote, length in copies.tolist():
            target[own : own + length].copy_(source[remote : remote + length])
        return
    own_rows, remote_rows = (
        _list_rows(copies[:, side], copies[:, 2], row_bytes) for side in (0, 1)
    )
    targets, sources = _view_rows(target, row_bytes), _view_rows(source, row_bytes)
    if _is_consecutive(own_rows):
        out = targets[own_rows[0] : own_rows[-1] + 1]
        torch.index_select(sources, 0, torch.from_numpy(remote_rows).to(source.device), out=out)
        return
    picked = (
        sources[remote_rows[0] : remote_rows[-1] + 1]
        if _is_consecutive(remote_rows)
        else sources.index_select(0, torch.from_numpy(remote_rows).to(source.device))
    )
    targets.index_copy_(0, torch.from_numpy(own_rows).to(target.device), picked)


def _list_rows(offsets: _Numbers, lengths: _Numbers, row_bytes: int) -> _Numbers:
    """Return the number of each row of the ranges, in their order."""
    first = offsets // row_bytes
    counts = lengths // row_bytes
    if (counts == 1).all():
        return first
    before = np.cumsum(counts) - counts
    within = np.arange(counts.sum()) - np.repeat(before, counts)
    rows: _Numbers = np.repeat(first, counts) + within
    return rows


def _view_rows(region: torch.Tensor, row_bytes: int) -> torch.Tensor:
    count = region.numel() // row_bytes
    return region[: count * row_bytes].view(_WORD).view(count, row_bytes // _WORD.itemsize)


def _is_consecutive(rows: _Numbers) -> bool:
    return bool((np.diff(rows) == 1).all())


def register_tensors(
    tensors: Iterable[torch.Tensor], num_blocks: int
) -> tuple[Memory, list[LayerRegion]]:
    """Return KV caches (one tensor per layer, blocks in dimension 0) as regions and layers. Layers
    of one allocation share a region. Raises ValueError when blocks are not contiguous."""
    regions: dict[int, int] = {}
    flat: list[torch.Tensor] = []
    layers: list[LayerRegion] = []
    for tensor in tensors:
        if tensor.dim() < 2 or tensor.shape[0] < num_blocks or not tensor[0].is_contiguous():
            raise ValueError(f"a KV cache of shape {tuple(tensor.shape)} has no contiguous blocks")
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in regions:
            regions[address] = len(flat)
            flat.append(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
        size = tensor.element_size()
        offset, stride = tensor.storage_offset() * size, tensor.stride(0) * size
        layers.append(LayerRegion(regions[address], offset, stride, tensor[0].numel() * size))
    return Memory(flat), layers
