"""Messages between the two ends of a KV transfer, framed over a blocking socket.

Used by threads of `KvServer` and `KvClient`. Every send and receive has a deadline for the whole
frame, so a peer that hangs or sends byte by byte costs a bounded time.
"""

import contextlib
import functools
import operator
import socket
import time
from typing import TypeVar

import msgspec

from cleave_worker.transfer.handoff import KvLayout, RefusalReason, RefusedError, refuse_on
from cleave_worker.transfer.memory import LayerRegion
from cleave_worker.transfer.progress import Progress
from cleave_worker.transfer.sharding import ParallelShape, ShardSource
from cleave_worker.transfer.transport import Transport
from cleave_worker.transfer.transports.cuda_ipc import ExportedMemory
from cleave_worker.transfer.transports.nixl import NixlMetadata
from cleave_worker.transfer.transports.shared_memory import SharedRegion

RESPONSE_TIMEOUT_S = 20.0
"""Includes the time that the server waits for its engine to report a prefill, see `KvServer`."""
_LENGTH_BYTES = 4
_MAX_FRAME = 16 << 20


class ProtocolError(OSError):
    """The peer broke the protocol or closed the connection, or the deadline was exceeded."""


class Message(msgspec.Struct, tag=True, frozen=True):
    """Base of all messages; each is tagged with its class name."""


class Challenge(Message, frozen=True):
    """First message on a connection to an engine with a key. Answered by `ChallengeResponse`."""

    nonce: bytes


class ChallengeResponse(Message, frozen=True):
    """The consumer has the key, see `authentication`. Answered by `ProducerMac`."""

    nonce: bytes
    mac: bytes


class ProducerMac(Message, frozen=True):
    """The producer has the key. The consumer's first request follows."""

    mac: bytes


class HandshakeRequest(Message, frozen=True):
    """First request of a consumer. Answered by `HandshakeResponse` or `ErrorResponse`."""

    boot_id: str
    """Boot id of the producer engine for which it is meant."""
    layout: KvLayout
    shape: ParallelShape
    source: ShardSource
    """The producer rank that it is for, and the part of its KV that the consumer needs."""
    consumer_boot_id: str
    consumer_rank: int


class RanksRequest(Message, frozen=True):
    """First request instead of a handshake: requests all ranks. Answered by `RanksResponse`."""

    boot_id: str


class RanksResponse(Message, frozen=True):
    """The fields of a handoff that locate the producer's ranks."""

    shape: ParallelShape
    addresses: tuple[tuple[str, int], ...]
    """(host, port) of each rank, in the order of ranks."""


class HandshakeResponse(Message, frozen=True):
    """The producer has this boot id, the same layout and the requested part of the KV: `layers`."""

    layers: tuple[LayerRegion, ...]
    shared: tuple[SharedRegion, ...]
    """Empty when the producer's memory cannot be mapped."""
    first_layer: int = 0
    """Index of the first of `layers` among the producer rank's own, by which `Progress` counts."""
    supports_nixl: bool = False
    place: str = ""
    """`cuda_ipc.find_place` of the producer; empty: it exports no memory."""


class RendezvousRequest(Message, frozen=True):
    """Open a link over a transport. Answered by `RendezvousResponse`."""

    transport: Transport


class RendezvousResponse(Message, frozen=True):
    """A two-sided link can be made, with `StoreEntry`s, or what a one-sided one needs."""

    nonce: bytes = b""
    """Of the two-sided link: identifies its entries, and both ends prove over it who they are."""
    nixl_metadata: NixlMetadata | None = None
    """None also when NIXL fails on the producer."""
    exported: ExportedMemory | None = None
    """For CUDA IPC; None also when its memory cannot be exported."""


class StoreEntry(Message, frozen=True):
    """What gloo or NCCL send to the other end while a link is made. No response."""

    nonce: bytes
    key: str
    value: bytes


class PullRequest(Message, frozen=True):
    """Request blocks of a leased request. Answered by `PullResponse`."""

    request_id: str
    epoch: int
    prompt_digest: str
    first_block: int
    num_blocks: int
    send: bool
    """True: the producer sends over the two-sided link; False: the consumer reads."""
    checksums: bool
    first_layer: int = 0
    num_layers: int = 0
    """0: all layers of a finished prefill; else a chunk of a running one."""
    blocks: tuple[int, ...] = ()
    """Of a cached prefix: all of `PrefixLease.blocks`, of which `first_block` and `num_blocks`
    select; `request_id` and what identifies a prefill are then empty."""
    blocks_mac: bytes = b""
    """`PrefixLease.blocks_mac`."""


class ProgressRequest(Message, frozen=True):
    """Wait until a prefill has more than `previous`. Answered by `ProgressUpdate`."""

    name: str
    prompt_digest: str
    previous: Progress


class ProgressUpdate(Message, frozen=True):
    """The engine's id of the request, and how much of its KV may be pulled."""

    request_id: str
    epoch: int
    progress: Progress


class PullResponse(Message, frozen=True):
    """Blocks that belong to the consumer until it releases them, for a bounded time. For a running
    prefill that time starts when it ends."""

    blocks: tuple[int, ...]
    checksums: tuple[int, ...] = ()


class ReleaseBlocks(Message, frozen=True):
    """The blocks were read, or will not be read. Answered by `ReleaseBlocksResponse`."""

    request_id: str
    epoch: int
    """0: the epoch is unknown and `request_id` is the name of a prefill."""


class ReleaseBlocksResponse(Message, frozen=True):
    """Whether the blocks were leased until now; if not, the consumer must discard what it read."""

    was_leased: bool


class LeaseHeartbeat(Message, frozen=True):
    """Extend the leases of requests that are still queued at the consumer. No response."""

    request_ids: tuple[str, ...]


class PrefixRequest(Message, frozen=True):
    """First message at a scheduler's port: leases the beginning of a prompt in its prefix cache.
    Answered by `PrefixLease`."""

    boot_id: str
    keys: tuple[bytes, ...]
    """Those under which prefix caches know the blocks, in the order of the prompt."""


class PrefixLease(Message, frozen=True):
    """The leading blocks of the request that are in the prefix cache, leased until the consumer
    closes the connection, for a bounded time."""

    lease_id: int
    blocks: tuple[int, ...]
    blocks_mac: bytes
    """For the ranks: the scheduler's signature under `blocks`."""
    shape: ParallelShape
    addresses: tuple[tuple[str, int], ...]
    """(host, port) of each rank, in the order of ranks."""


class PrefixLeaseCheck(Message, frozen=True):
    """First message at a scheduler's port, of a rank that has read blocks of a lease. Answered by
    `PrefixLeaseState`."""

    boot_id: str
    lease_id: int


class PrefixLeaseState(Message, frozen=True):
    """Whether the blocks are still leased; if not, the consumer must discard what it read."""

    is_leased: bool


class ErrorResponse(Message, frozen=True):
    """Error response to any request."""

    reason: RefusalReason
    text: str


ResponseT = TypeVar("ResponseT", bound=Message)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(
    functools.reduce(operator.or_, Message.__subclasses__())
)


class FramedConnection:
    """One connection that sends and receives framed messages."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._returned: Message | None = None

    def send(self, message: Message, seconds: float) -> None:
        """Write one frame. Raises ProtocolError."""
        body = _encoder.encode(message)
        try:
            self._socket.settimeout(seconds)
            self._socket.sendall(len(body).to_bytes(_LENGTH_BYTES, "big") + body)
        except OSError as error:
            raise ProtocolError(f"cannot write: {error}") from error

    def receive(self, seconds: float, max_bytes: int = _MAX_FRAME) -> Message:
        """Read one frame. Raises ProtocolError, or TimeoutError after `seconds`."""
        if self._returned is not None:
            message, self._returned = self._returned, None
            return message
        deadline = time.monotonic() + seconds
        length = int.from_bytes(self._read_exactly(_LENGTH_BYTES, deadline), "big")
        if length > max_bytes:
            raise ProtocolError(f"frame of {length} bytes")
        try:
            return _decoder.decode(self._read_exactly(length, deadline))
        except msgspec.DecodeError as error:
            raise ProtocolError("unreadable frame") from error

    def return_message(self, message: Message) -> None:
        """Give back the message that was received last; the next `receive` returns it again."""
        self._returned = message

    def is_lost(self) -> bool:
        """Whether the peer has closed the connection; for one on which nothing is awaited."""
        try:
            self._socket.settimeout(0)
            return not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Close the connection; a thread that reads from it gets an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read_exactly(self, length: int, deadline: float) -> bytes:
        body = bytearray()
        while len(body) < length:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError("no complete message in time")
            try:
                self._socket.settimeout(remaining)
                part = self._socket.recv(min(length - len(body), 1 << 16))
            except TimeoutError:
                raise TimeoutError("no complete message in time") from None
            except OSError as error:
                raise ProtocolError(f"cannot read: {error}") from error
            if not part:
                raise ProtocolError("connection closed")
            body += part
        return bytes(body)


def connect(address: tuple[str, int], seconds: float) -> FramedConnection:
    """Connect without proofs and without a handshake. Raises RefusedError."""
    try:
        return FramedConnection(socket.create_connection(address, seconds))
    except (OSError, UnicodeError, OverflowError) as error:
        fault = f"{address[0]}:{address[1]}: {error}"
        raise RefusedError(RefusalReason.PEER_LOST, fault) from error


def send_request(
    connection: FramedConnection, request: Message, response_type: type[ResponseT], seconds: float
) -> ResponseT:
    """Send a request and return the response, which must be of this type. Raises RefusedError."""
    with (
        refuse_on(TimeoutError, RefusalReason.TIME_OUT),
        refuse_on(ProtocolError, RefusalReason.PEER_LOST),
    ):
        connection.send(request, seconds)
        response = connection.receive(seconds)
        while isinstance(response, StoreEntry):
            # Of a link that this end has given up.
            response = connection.receive(seconds)
    if isinstance(response, ErrorResponse):
        raise RefusedError(response.reason, response.text)
    if not isinstance(response, response_type):
        fault = f"{type(response).__name__} in place of {response_type.__name__}"
        raise RefusedError(RefusalReason.PEER_LOST, fault)
    return response


def release_blocks(connection: FramedConnection, request_id: str, epoch: int) -> None:
    """Release the blocks of a request. Raises RefusedError, also when the lease has ended."""
    release = ReleaseBlocks(request_id, epoch)
    if not send_request(connection, release, ReleaseBlocksResponse, RESPONSE_TIMEOUT_S).was_leased:
        raise RefusedError(RefusalReason.LAPSED, "the lease ended before the blocks were read")
