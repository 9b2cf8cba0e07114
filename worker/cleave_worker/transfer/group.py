"""Two-sided link over torch.distributed: gloo on the host, NCCL between GPUs, the same code.

Every pair of engines has a group of its own, made and torn down without anybody else's part: the
engine's groups and other pairs never wait for it. What is hard: a receive that has timed out may
still be filled later, and gloo takes a message that is too short for a whole one. Bytes therefore
arrive in a buffer of the link, a seal behind each piece tells that all of it is there, only then is
it moved on, and the buffer dies with the link.
"""

import time
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from cleave_worker.transfer.link import LinkError, Way
from cleave_worker.transfer.memory import Memory, Span, packed, pieces

_PIECE_BYTES = 8 << 20
"""Moved at a time: enough for the full rate, and the next is packed meanwhile."""
_SEAL_BYTES = 16
"""Number of the piece on this link, and its length."""
_TAG = 7
_SHORTEST_S = 0.001
"""torch takes 0 for no bound."""


class Meeting:
    """Where the two ends of a pair find each other; the owner opens it."""

    def __init__(self, host: str, seconds: float) -> None:
        """Listen on a free port of `host`."""
        self._store = TCPStore(
            host, 0, 2, True, timeout=timedelta(seconds=seconds), wait_for_workers=False
        )
        self.port: int = self._store.port

    def enter(self, memory: Memory, way: Way, host: str, seconds: float) -> "Group":
        """The owner's end of the link. Raises LinkError when nobody comes in time."""
        return _enter(self._store, memory, way, host, rank=0, seconds=seconds)


def join(memory: Memory, way: Way, peer: tuple[str, int], own_host: str, seconds: float) -> "Group":
    """The other end: meet at the owner's (host, port). Raises LinkError."""
    try:
        store = TCPStore(*peer, 2, False, timeout=timedelta(seconds=seconds))
    except RuntimeError as error:
        raise LinkError(f"no meeting at {peer[0]}:{peer[1]}") from error
    return _enter(store, memory, way, own_host, rank=1, seconds=seconds)


def _enter(
    store: TCPStore, memory: Memory, way: Way, host: str, rank: int, seconds: float
) -> "Group":
    try:
        if way is Way.NCCL:
            group = _nccl(store, rank, seconds)
        else:
            group = _gloo(store, rank, host, seconds)
    except RuntimeError as error:
        raise LinkError(f"no {way} group with the peer: {_first_line(error)}") from error
    return Group(memory, way, group, store, 1 - rank)


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
    """A TwoSided link; used by one thread at a time."""

    def __init__(self, memory: Memory, way: Way, group: object, store: TCPStore, peer: int) -> None:
        self.way = way
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
        """Pack one piece while the piece before is under way. Raises LinkError."""
        deadline = time.monotonic() + seconds
        try:
            under_way = None
            for number, piece in enumerate(pieces(spans, _PIECE_BYTES)):
                sealed = self._pack(piece, self._buffers[number % 2])
                _wait(under_way, deadline)
                under_way = self._live().send([sealed], self._peer, _TAG)
            _wait(under_way, deadline)
        except (RuntimeError, ValueError) as error:
            self.close()
            raise LinkError(f"sending failed: {_first_line(error)}") from error

    def receive(self, spans: Iterable[Span], seconds: float) -> None:
        """Unpack one piece while the next one comes. Raises LinkError."""
        deadline = time.monotonic() + seconds
        try:
            arrived: tuple[list[Span], Memory] | None = None
            for number, piece in enumerate(pieces(spans, _PIECE_BYTES)):
                length = sum(span.length for span in piece)
                buffer = self._buffers[number % 2]
                _seal(buffer, length).zero_()
                filled = buffer.view(Span(0, 0, _sealed_length(length)))
                coming = self._live().recv([filled], self._peer, _TAG)
                self._unpack(arrived)
                _wait(coming, deadline)
                self._check_seal(buffer, length)
                arrived = (piece, buffer)
            self._unpack(arrived)
        except (RuntimeError, ValueError) as error:
            self.close()
            raise LinkError(f"receiving failed: {_first_line(error)}") from error

    def close(self) -> None:
        """Leave the group; what is under way ends with an error on both sides."""
        self._group = None

    def _live(self) -> ProcessGroupGloo:
        if self._group is None:
            raise ValueError("the link is closed")
        return self._group

    def _pack(self, piece: Sequence[Span], buffer: Memory) -> torch.Tensor:
        places = packed(piece)
        buffer.fill(self._memory, zip(places, piece, strict=True))
        filled = places[-1].offset + places[-1].length
        self._num_pieces += 1
        _seal(buffer, filled).copy_(torch.tensor([self._num_pieces, filled]))
        return buffer.view(Span(0, 0, _sealed_length(filled)))

    def _unpack(self, arrived: tuple[list[Span], Memory] | None) -> None:
        if arrived is None:
            return
        piece, buffer = arrived
        self._memory.fill(buffer, zip(piece, packed(piece), strict=True))

    def _check_seal(self, buffer: Memory, length: int) -> None:
        """Raises ValueError unless the next piece is there, whole."""
        self._num_pieces += 1
        if _seal(buffer, length).tolist() != [self._num_pieces, length]:
            raise ValueError("another piece came than the one expected")


def _seal(buffer: Memory, length: int) -> torch.Tensor:
    start = _sealed_length(length) - _SEAL_BYTES
    return buffer.view(Span(0, start, _SEAL_BYTES)).view(torch.int64)


def _sealed_length(length: int) -> int:
    return -(-length // 8) * 8 + _SEAL_BYTES


def _wait(work: object | None, deadline: float) -> None:
    if work is not None:
        left = max(_SHORTEST_S, deadline - time.monotonic())
        work.wait(timedelta(seconds=left))  # type: ignore[attr-defined]


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
