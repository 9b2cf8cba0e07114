"""Two-sided link over torch.distributed: gloo between hosts, NCCL between GPUs, with the same code.

Each pair of engines has a process group of its own, created and destroyed without other engines,
whose groups never wait for it. What is hard: a receive that timed out may still be filled later,
and gloo accepts a message that is too short. So bytes arrive in a buffer of the link, a trailer
after each chunk proves that it is complete, only then is it unpacked, and the buffer is dropped
with the link.
"""

import time
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from cleave_worker.transfer.memory import Memory, Span, packed, pieces
from cleave_worker.transfer.transport import LinkError, Way

_PIECE_BYTES = 8 << 20
"""Bytes per chunk: enough for the full rate; the next chunk is packed meanwhile."""
_SEAL_BYTES = 16
"""Number of the chunk on this link, and its length in bytes."""
_TAG = 7
_SHORTEST_S = 0.001
"""torch takes 0 for no timeout."""


class Meeting:
    """Where the two ends of a link find each other; the producer opens it."""

    def __init__(self, host: str, seconds: float) -> None:
        """Listen on a free port of `host`."""
        self._store = TCPStore(
            host, 0, 2, True, timeout=timedelta(seconds=seconds), wait_for_workers=False
        )
        self.port: int = self._store.port

    def enter(self, memory: Memory, transport: Way, host: str, seconds: float) -> "Group":
        """Return the producer's end of the link. Raises LinkError when the peer is late."""
        return _enter(self._store, memory, transport, host, rank=0, seconds=seconds)


def join(
    memory: Memory, transport: Way, peer: tuple[str, int], own_host: str, seconds: float
) -> "Group":
    """Return the consumer's end, given the producer's (host, port). Raises LinkError."""
    try:
        store = TCPStore(*peer, 2, False, timeout=timedelta(seconds=seconds))
    except RuntimeError as error:
        raise LinkError(f"no rendezvous at {peer[0]}:{peer[1]}") from error
    return _enter(store, memory, transport, own_host, rank=1, seconds=seconds)


def _enter(
    store: TCPStore, memory: Memory, transport: Way, host: str, rank: int, seconds: float
) -> "Group":
    try:
        if transport is Way.NCCL:
            group = _nccl(store, rank, seconds)
        else:
            group = _gloo(store, rank, host, seconds)
    except RuntimeError as error:
        raise LinkError(f"no {transport} group with the peer: {_first_line(error)}") from error
    return Group(memory, transport, group, store, 1 - rank)


def _gloo(store: TCPStore, rank: int, host: str, seconds: float) -> ProcessGroupGloo:
    options = ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=seconds)
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    return ProcessGroupGloo(PrefixStore("kv", store), rank, 2, options)


def _nccl(store: TCPStore, rank: int, seconds: float) -> object:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=seconds)
    return ProcessGroupNCCL(PrefixStore("kv", store), rank, 2, options)


class Group:
    """A TwoSided link; one thread uses it at a time."""

    def __init__(
        self, memory: Memory, transport: Way, group: object, store: TCPStore, peer: int
    ) -> None:
        self.way = transport
        self._memory = memory
        self._group: ProcessGroupGloo | None = group
        self._store = store
        self._peer = peer
        device = memory.regions[0].device if memory.regions else torch.device("cpu")
        size = _PIECE_BYTES + _SEAL_BYTES
        self._buffers = [
            Memory([torch.empty(size, dtype=torch.uint8, device=device)]) for _ in range(2)
        ]
        self._num_pieces = 0

    def send(self, spans: Iterable[Span], seconds: float) -> None:
        """Pack one chunk while the previous one is sent. Raises LinkError."""
        deadline = time.monotonic() + seconds
        try:
            pending = None
            for number, ranges in enumerate(pieces(spans, _PIECE_BYTES)):
                message = self._pack(ranges, self._buffers[number % 2])
                _wait(pending, deadline)
                pending = self._live().send([message], self._peer, _TAG)
            _wait(pending, deadline)
        except (RuntimeError, ValueError) as error:
            self.close()
            raise LinkError(f"sending failed: {_first_line(error)}") from error

    def receive(self, spans: Iterable[Span], seconds: float) -> None:
        """Unpack one chunk while the next one arrives. Raises LinkError."""
        deadline = time.monotonic() + seconds
        try:
            received: tuple[list[Span], Memory] | None = None
            for number, ranges in enumerate(pieces(spans, _PIECE_BYTES)):
                length = sum(span.length for span in ranges)
                buffer = self._buffers[number % 2]
                _seal(buffer, length).zero_()
                message = buffer.view(Span(0, 0, _sealed_length(length)))
                pending = self._live().recv([message], self._peer, _TAG)
                self._unpack(received)
                _wait(pending, deadline)
                self._check_seal(buffer, length)
                received = (ranges, buffer)
            self._unpack(received)
        except (RuntimeError, ValueError) as error:
            self.close()
            raise LinkError(f"receiving failed: {_first_line(error)}") from error

    def close(self) -> None:
        """Leave the group; pending calls fail at both ends."""
        self._group = None

    def _live(self) -> ProcessGroupGloo:
        if self._group is None:
            raise ValueError("the link is closed")
        return self._group

    def _pack(self, ranges: Sequence[Span], buffer: Memory) -> torch.Tensor:
        packed_ranges = packed(ranges)
        buffer.fill(self._memory, zip(packed_ranges, ranges, strict=True))
        filled = packed_ranges[-1].offset + packed_ranges[-1].length
        self._num_pieces += 1
        _seal(buffer, filled).copy_(torch.tensor([self._num_pieces, filled]))
        return buffer.view(Span(0, 0, _sealed_length(filled)))

    def _unpack(self, received: tuple[list[Span], Memory] | None) -> None:
        if received is None:
            return
        ranges, buffer = received
        self._memory.fill(buffer, zip(ranges, packed(ranges), strict=True))

    def _check_seal(self, buffer: Memory, length: int) -> None:
        """Raises ValueError unless the chunk is complete and the expected one."""
        self._num_pieces += 1
        if _seal(buffer, length).tolist() != [self._num_pieces, length]:
            raise ValueError("an unexpected or incomplete chunk arrived")


def _seal(buffer: Memory, length: int) -> torch.Tensor:
    start = _sealed_length(length) - _SEAL_BYTES
    return buffer.view(Span(0, start, _SEAL_BYTES)).view(torch.int64)


def _sealed_length(length: int) -> int:
    return -(-length // 8) * 8 + _SEAL_BYTES


def _wait(work: object | None, deadline: float) -> None:
    if work is not None:
        remaining = max(_SHORTEST_S, deadline - time.monotonic())
        work.wait(timedelta(seconds=remaining))  # type: ignore[attr-defined]


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
