"""Two-sided links: the producer packs KV into messages, the consumer unpacks them.

Each pair of engines has a channel of its own, created and destroyed without other engines, which
never wait for it: gloo over TCP (`gloo`), or NCCL (`nccl`). A receive that timed out may still be
filled later, gloo accepts a message that is too short, and a receive of NCCL that was aborted looks
complete. So bytes arrive in a buffer of the link, a trailer after each chunk proves that it is
complete, only then is it unpacked, and the buffer is dropped with the link.

KV on a GPU is packed by one or two kernels for each chunk. gloo moves host memory only; there a
chunk takes one copy between a pinned buffer and a staging buffer on the GPU.
"""

import hmac
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from cleave_worker.transfer.authentication import compute_link_macs
from cleave_worker.transfer.copy_stream import wait_for_copies
from cleave_worker.transfer.memory import ByteRange, Memory, chunk_ranges, pack_ranges
from cleave_worker.transfer.protocol import FramedConnection
from cleave_worker.transfer.transport import LinkError, MessageChannel, PendingMessage, Transport
from cleave_worker.transfer.transports import gloo, nccl
from cleave_worker.transfer.transports.connection_store import ConnectionStore

_CHUNK_BYTES = 8 << 20
"""Bytes per chunk: enough for the full rate; the next chunk is packed meanwhile."""
_TRAILER_BYTES = 16
"""Number of the chunk on this link, and its length in bytes."""
_MAX_STAGING_BUFFERS = 16
"""128 MiB of a GPU, which are outside the share that vLLM plans with; further transfers wait."""
_MIN_TIMEOUT_S = 0.001
"""torch reads 0 as no timeout."""


class Rendezvous:
    """Where the two ends make a link: on their authenticated connection, without a port of its own.

    gloo and NCCL then connect to each other at further ports. NCCL's ask for a random number of the
    id that rank 0 sends to rank 1 here; gloo's ask for nothing. So before gloo carries KV each end
    proves over it that it has the producer's key."""

    def __init__(
        self, connection: FramedConnection, nonce: bytes, key: str, seconds: float
    ) -> None:
        """`nonce`: of `RendezvousResponse`. `seconds`: for all steps together."""
        self._deadline = time.monotonic() + seconds
        self._store = ConnectionStore(connection, nonce, seconds)
        self._nonce = nonce
        self._key = key

    def create_producer_link(
        self, memory: Memory, transport: Transport, host: str
    ) -> "TwoSidedLink":
        """Return the producer's end. Raises LinkError when the consumer is late or another one."""
        return self._create_link(memory, transport, host, rank=0)

    def create_consumer_link(
        self, memory: Memory, transport: Transport, host: str
    ) -> "TwoSidedLink":
        """Return the consumer's end. Raises LinkError when the producer is late or another one."""
        return self._create_link(memory, transport, host, rank=1)

    def _create_link(
        self, memory: Memory, transport: Transport, host: str, rank: int
    ) -> "TwoSidedLink":
        seconds = max(_MIN_TIMEOUT_S, self._deadline - time.monotonic())
        channel: MessageChannel
        try:
            if transport is Transport.NCCL:
                channel = nccl.NcclChannel(self._store, rank, memory.device, seconds)
            else:
                channel = gloo.GlooChannel(self._store, rank, host, seconds)
                self._authenticate(channel, rank)
        except RuntimeError as error:
            fault = f"no {transport} group with the peer: {_get_first_line(error)}"
            raise LinkError(fault) from error
        return TwoSidedLink(memory, channel)

    def _authenticate(self, channel: MessageChannel, rank: int) -> None:
        """Raises LinkError, RuntimeError."""
        if not self._key:
            return
        macs = compute_link_macs(self._key, self._nonce)
        own = torch.frombuffer(bytearray(macs[rank]), dtype=torch.uint8)
        theirs = torch.zeros_like(own)
        sent, received = channel.send(own), channel.receive(theirs)
        try:
            _wait(sent, self._deadline)
            _wait(received, self._deadline)
            if not hmac.compare_digest(bytes(theirs.tolist()), macs[1 - rank]):
                raise LinkError("the peer of the link does not have the key")
        except BaseException:
            channel.abort()
            raise


class TwoSidedLink:
    """Both ends take part, with ranges of equal total length.

    One thread uses it at a time, any thread may close it. After a LinkError the ranges to receive
    may be partly filled, but are never written after the call.
    """

    def __init__(self, memory: Memory, channel: MessageChannel) -> None:
        self._memory = memory
        self._channel: MessageChannel | None = channel
        size = _CHUNK_BYTES + _TRAILER_BYTES
        on_host = channel.device.type == "cpu"
        self._is_staged = on_host and memory.device.type != "cpu"
        self._buffers = [
            Memory(
                [
                    torch.empty(
                        size, dtype=torch.uint8, device=channel.device, pin_memory=self._is_staged
                    )
                ]
            )
            for _ in range(2)
        ]
        self._num_chunks = 0

    def send(self, spans: Iterable[ByteRange], seconds: float) -> None:
        """Pack one chunk while the previous one is sent. Raises LinkError."""
        deadline = time.monotonic() + seconds
        with self._close_on_error("sending"), self._acquire_staging(deadline) as staging:
            pending = None
            for number, ranges in enumerate(chunk_ranges(spans, _CHUNK_BYTES)):
                message = self._pack(ranges, self._buffers[number % 2], staging)
                _wait(pending, deadline)
                pending = self._require_channel().send(message)
            _wait(pending, deadline)

    def receive(self, spans: Iterable[ByteRange], seconds: float) -> None:
        """Unpack one chunk while the next one arrives. Raises LinkError."""
        deadline = time.monotonic() + seconds
        with self._close_on_error("receiving"), self._acquire_staging(deadline) as staging:
            received: tuple[list[ByteRange], Memory] | None = None
            for number, ranges in enumerate(chunk_ranges(spans, _CHUNK_BYTES)):
                length = sum(span.length for span in ranges)
                buffer = self._buffers[number % 2]
                _view_trailer(buffer, length).zero_()
                wait_for_copies(buffer.device)
                message = buffer.view(ByteRange(0, 0, _compute_message_bytes(length)))
                pending = self._require_channel().receive(message)
                self._unpack(received, staging)
                _wait(pending, deadline)
                self._check_trailer(buffer, length)
                received = (ranges, buffer)
            self._unpack(received, staging)

    def close(self) -> None:
        """Leave the channel; pending calls fail at both ends."""
        channel, self._channel = self._channel, None
        if channel:
            channel.abort()

    def _require_channel(self) -> MessageChannel:
        channel = self._channel
        if channel is None:
            raise ValueError("the link is closed")
        return channel

    @contextmanager
    def _close_on_error(self, action: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError, LinkError) as error:
            self.close()
            raise LinkError(f"{action} failed: {_get_first_line(error)}") from error

    @contextmanager
    def _acquire_staging(self, deadline: float) -> Iterator[Memory | None]:
        if not self._is_staged:
            yield None
            return
        staging = _staging_pool.acquire(self._memory.device, deadline)
        try:
            yield staging
        finally:
            # Another thread uses it next, on another stream.
            wait_for_copies(self._memory.device)
            _staging_pool.release(staging)

    def _pack(
        self, ranges: Sequence[ByteRange], buffer: Memory, staging: Memory | None
    ) -> torch.Tensor:
        packed_ranges = pack_ranges(ranges)
        packed = staging or buffer
        packed.copy_from(self._memory, zip(packed_ranges, ranges, strict=True))
        filled = packed_ranges[-1].offset + packed_ranges[-1].length
        if staging:
            filled_range = ByteRange(0, 0, filled)
            buffer.view(filled_range).copy_(staging.view(filled_range), non_blocking=True)
        self._num_chunks += 1
        _view_trailer(buffer, filled).copy_(torch.tensor([self._num_chunks, filled]))
        wait_for_copies(self._memory.device)
        return buffer.view(ByteRange(0, 0, _compute_message_bytes(filled)))

    def _unpack(
        self, received: tuple[list[ByteRange], Memory] | None, staging: Memory | None
    ) -> None:
        """Copy a chunk to its ranges, and wait: the engine reads them, and the buffer is reused."""
        if received is None:
            return
        ranges, buffer = received
        packed_ranges = pack_ranges(ranges)
        if staging:
            filled = ByteRange(0, 0, packed_ranges[-1].offset + packed_ranges[-1].length)
            staging.view(filled).copy_(buffer.view(filled), non_blocking=True)
        self._memory.copy_from(staging or buffer, zip(ranges, packed_ranges, strict=True))
        wait_for_copies(self._memory.device)

    def _check_trailer(self, buffer: Memory, length: int) -> None:
        """Raises ValueError unless the chunk is complete and the expected one."""
        self._num_chunks += 1
        if _view_trailer(buffer, length).tolist() != [self._num_chunks, length]:
            raise ValueError("an unexpected or incomplete chunk arrived")


class _StagingPool:
    """Staging buffers on the GPU of this process, shared by all its links."""

    def __init__(self) -> None:
        self._free: list[Memory] = []
        self._slots = threading.BoundedSemaphore(_MAX_STAGING_BUFFERS)

    def acquire(self, device: torch.device, deadline: float) -> Memory:
        """Return a buffer; the caller must `release` it. Raises LinkError after the deadline."""
        if not self._slots.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise LinkError(f"{_MAX_STAGING_BUFFERS} transfers are running, and none ended in time")
        try:
            return self._free.pop()
        except IndexError:
            return self._allocate(device)

    def _allocate(self, device: torch.device) -> Memory:
        try:
            return Memory([torch.empty(_CHUNK_BYTES, dtype=torch.uint8, device=device)])
        except BaseException:
            self._slots.release()
            raise

    def release(self, staging: Memory) -> None:
        """Return a buffer whose copies are done."""
        self._free.append(staging)
        self._slots.release()


_staging_pool = _StagingPool()


def _view_trailer(buffer: Memory, length: int) -> torch.Tensor:
    start = _compute_message_bytes(length) - _TRAILER_BYTES
    return buffer.view(ByteRange(0, start, _TRAILER_BYTES)).view(torch.int64)


def _compute_message_bytes(length: int) -> int:
    return -(-length // 8) * 8 + _TRAILER_BYTES


def _wait(pending: PendingMessage | None, deadline: float) -> None:
    if pending is not None:
        pending.wait(max(_MIN_TIMEOUT_S, deadline - time.monotonic()))


def _get_first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
