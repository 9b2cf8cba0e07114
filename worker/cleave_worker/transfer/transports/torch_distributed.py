"""Two-sided link over torch.distributed: gloo between hosts, NCCL between GPUs, with the same code.

Each pair of engines has its own process group, created and destroyed without other engines, whose
groups never wait for it. A receive that timed out may still be filled later, and gloo accepts a
message that is too short. So bytes arrive in a buffer of the link, a trailer after each chunk
proves that it is complete, only then is it unpacked, and the buffer is dropped with the link.
"""

import time
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from cleave_worker.transfer.memory import ByteRange, Memory, chunk_ranges, pack_ranges
from cleave_worker.transfer.transport import LinkError, Transport

_CHUNK_BYTES = 8 << 20
"""Bytes per chunk: enough for the full rate; the next chunk is packed meanwhile."""
_TRAILER_BYTES = 16
"""Number of the chunk on this link, and its length in bytes."""
_TAG = 7
_MIN_TIMEOUT_S = 0.001
"""torch reads 0 as no timeout."""


class Rendezvous:
    """Where the two ends of a link find each other; the producer opens it."""

    def __init__(self, host: str, seconds: float) -> None:
        """Listen on a free port of `host`."""
        self._store = TCPStore(
            host, 0, 2, True, timeout=timedelta(seconds=seconds), wait_for_workers=False
        )
        self.port: int = self._store.port

    def create_link(
        self, memory: Memory, transport: Transport, host: str, seconds: float
    ) -> "ProcessGroupLink":
        """Return the producer's end of the link. Raises LinkError when the peer is late."""
        return _create_link(self._store, memory, transport, host, rank=0, seconds=seconds)


def join_rendezvous(
    memory: Memory, transport: Transport, peer: tuple[str, int], own_host: str, seconds: float
) -> "ProcessGroupLink":
    """Return the consumer's end, given the producer's (host, port). Raises LinkError."""
    try:
        store = TCPStore(*peer, 2, False, timeout=timedelta(seconds=seconds))
    except RuntimeError as error:
        raise LinkError(f"no rendezvous at {peer[0]}:{peer[1]}") from error
    return _create_link(store, memory, transport, own_host, rank=1, seconds=seconds)


def _create_link(
    store: TCPStore, memory: Memory, transport: Transport, host: str, rank: int, seconds: float
) -> "ProcessGroupLink":
    try:
        if transport is Transport.NCCL:
            group = _create_nccl_group(store, rank, seconds)
        else:
            group = _create_gloo_group(store, rank, host, seconds)
    except RuntimeError as error:
        raise LinkError(f"no {transport} group with the peer: {_get_first_line(error)}") from error
    return ProcessGroupLink(memory, group, store, 1 - rank)


def _create_gloo_group(store: TCPStore, rank: int, host: str, seconds: float) -> ProcessGroupGloo:
    options = ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=seconds)
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    return ProcessGroupGloo(PrefixStore("kv", store), rank, 2, options)


def _create_nccl_group(store: TCPStore, rank: int, seconds: float) -> object:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=seconds)
    return ProcessGroupNCCL(PrefixStore("kv", store), rank, 2, options)


class ProcessGroupLink:
    """A two-sided link: both ends take part, with ranges of equal total length.

    One thread uses it at a time. After a LinkError the ranges to receive may be partly filled, but
    are never written after the call.
    """

    def __init__(self, memory: Memory, group: object, store: TCPStore, peer: int) -> None:
        self._memory = memory
        self._group: ProcessGroupGloo | None = group
        self._store = store
        self._peer = peer
        device = memory.regions[0].device if memory.regions else torch.device("cpu")
        size = _CHUNK_BYTES + _TRAILER_BYTES
        tensors = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
        self._buffers = [Memory([tensor]) for tensor in tensors]
        self._num_chunks = 0

    def send(self, spans: Iterable[ByteRange], seconds: float) -> None:
        """Pack one chunk while the previous one is sent. Raises LinkError."""
        deadline = time.monotonic() + seconds
        try:
            pending = None
            for number, ranges in enumerate(chunk_ranges(spans, _CHUNK_BYTES)):
                message = self._pack(ranges, self._buffers[number % 2])
                _wait(pending, deadline)
                pending = self._require_group().send([message], self._peer, _TAG)
            _wait(pending, deadline)
        except (RuntimeError, ValueError) as error:
            self.close()
            raise LinkError(f"sending failed: {_get_first_line(error)}") from error

    def receive(self, spans: Iterable[ByteRange], seconds: float) -> None:
        """Unpack one chunk while the next one arrives. Raises LinkError."""
        deadline = time.monotonic() + seconds
        try:
            received: tuple[list[ByteRange], Memory] | None = None
            for number, ranges in enumerate(chunk_ranges(spans, _CHUNK_BYTES)):
                length = sum(span.length for span in ranges)
                buffer = self._buffers[number % 2]
                _view_trailer(buffer, length).zero_()
                message = buffer.view(ByteRange(0, 0, _compute_message_bytes(length)))
                pending = self._require_group().recv([message], self._peer, _TAG)
                self._unpack(received)
                _wait(pending, deadline)
                self._check_trailer(buffer, length)
                received = (ranges, buffer)
            self._unpack(received)
        except (RuntimeError, ValueError) as error:
            self.close()
            raise LinkError(f"receiving failed: {_get_first_line(error)}") from error

    def close(self) -> None:
        """Leave the group; pending calls fail at both ends."""
        self._group = None

    def _require_group(self) -> ProcessGroupGloo:
        if self._group is None:
            raise ValueError("the link is closed")
        return self._group

    def _pack(self, ranges: Sequence[ByteRange], buffer: Memory) -> torch.Tensor:
        packed_ranges = pack_ranges(ranges)
        buffer.copy_from(self._memory, zip(packed_ranges, ranges, strict=True))
        filled = packed_ranges[-1].offset + packed_ranges[-1].length
        self._num_chunks += 1
        _view_trailer(buffer, filled).copy_(torch.tensor([self._num_chunks, filled]))
        return buffer.view(ByteRange(0, 0, _compute_message_bytes(filled)))

    def _unpack(self, received: tuple[list[ByteRange], Memory] | None) -> None:
        if received is None:
            return
        ranges, buffer = received
        self._memory.copy_from(buffer, zip(ranges, pack_ranges(ranges), strict=True))

    def _check_trailer(self, buffer: Memory, length: int) -> None:
        """Raises ValueError unless the chunk is complete and the expected one."""
        self._num_chunks += 1
        if _view_trailer(buffer, length).tolist() != [self._num_chunks, length]:
            raise ValueError("an unexpected or incomplete chunk arrived")


def _view_trailer(buffer: Memory, length: int) -> torch.Tensor:
    start = _compute_message_bytes(length) - _TRAILER_BYTES
    return buffer.view(ByteRange(0, start, _TRAILER_BYTES)).view(torch.int64)


def _compute_message_bytes(length: int) -> int:
    return -(-length // 8) * 8 + _TRAILER_BYTES


def _wait(work: object | None, deadline: float) -> None:
    if work is not None:
        remaining = max(_MIN_TIMEOUT_S, deadline - time.monotonic())
        work.wait(timedelta(seconds=remaining))  # type: ignore[attr-defined]


def _get_first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
