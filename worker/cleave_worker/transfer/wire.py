"""Messages between the two ends of a hand-off, and their framing over a blocking socket.

Used by threads of owner and reader. Every send and receive has a deadline for the whole frame, so
that a peer that stands still, or sends byte by byte, costs a bounded time.
"""

import socket
import time

import msgspec

from cleave_worker.transfer.identity import Layout, Reason
from cleave_worker.transfer.link import Way
from cleave_worker.transfer.memory import Plane
from cleave_worker.transfer.nixl import Reach
from cleave_worker.transfer.progress import Progress
from cleave_worker.transfer.shapes import Shape, Source
from cleave_worker.transfer.shared import SharedRegion

_LENGTH_BYTES = 4
_MAX_FRAME = 16 << 20


class WireError(OSError):
    """The peer broke the protocol, closed the connection or let the deadline pass."""


class Hello(msgspec.Struct, tag=True, frozen=True):
    """First message of a reader."""

    boot_id: str
    """Of the owner that is meant."""
    layout: Layout
    shape: Shape
    """The owner's, as the hand-off has it."""
    source: Source
    """Which rank is meant, and what this reader needs of it."""
    reader: str
    """Boot id of the reader's engine."""
    rank: int
    """Of the reader."""


class Locate(msgspec.Struct, tag=True, frozen=True):
    """In place of a greeting: where are the ranks of this engine? Answered by Located."""

    boot_id: str
    """Of the owner that is meant."""


class Located(msgspec.Struct, tag=True, frozen=True):
    """What a hand-off would say of its owner."""

    shape: Shape
    addresses: tuple[tuple[str, int], ...]
    """Of each rank, in the order of ranks."""


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """The owner is the one that was meant, has the same layout and what the reader needs."""

    planes: tuple[Plane, ...]
    """Where that lies."""
    shared: tuple[SharedRegion, ...]
    """Empty: its memory cannot be mapped."""
    first_plane: int = 0
    """Of these, among the owner's, by whose numbers it announces what is final."""
    nixl: bool = False
    """Whether it can be met that way."""


class Meet(msgspec.Struct, tag=True, frozen=True):
    """Make a link. Answered by Met."""

    way: Way


class Met(msgspec.Struct, tag=True, frozen=True):
    """Where the owner waits for the other end of a two-sided link, or how NIXL reads its memory."""

    port: int = 0
    reach: Reach | None = None
    """None also where NIXL does not do what it should."""


class Pull(msgspec.Struct, tag=True, frozen=True):
    """Ask for blocks of a held request."""

    request_id: str
    epoch: int
    prompt_digest: str
    first_block: int
    num_blocks: int
    send: bool
    """Over the two-sided link; False: the reader reads."""
    checksums: bool
    first_plane: int = 0
    num_planes: int = 0
    """0: all, of a prefill that has ended; otherwise a piece of one that the reader follows."""


class Follow(msgspec.Struct, tag=True, frozen=True):
    """Wait for more of a prefill than was seen. Answered by News."""

    name: str
    prompt_digest: str
    seen: Progress


class News(msgspec.Struct, tag=True, frozen=True):
    """What the engine calls the request, and how much of it may be pulled."""

    request_id: str
    epoch: int
    progress: Progress


class Grant(msgspec.Struct, tag=True, frozen=True):
    """The blocks are the reader's until it releases them, for a bounded time.

    Of a prefill that runs the time begins with its end.
    """

    blocks: tuple[int, ...]
    checksums: tuple[int, ...] = ()


class Release(msgspec.Struct, tag=True, frozen=True):
    """The blocks were read, or never will be. Answered by Released."""

    request_id: str
    epoch: int
    """0: not known, and the id is the name of a prefill that nobody follows."""


class Released(msgspec.Struct, tag=True, frozen=True):
    """Whether the blocks had been held until now: if not, what was read is void."""

    held: bool


class Beat(msgspec.Struct, tag=True, frozen=True):
    """These requests still wait for their turn: extend their leases. Not answered."""

    request_ids: tuple[str, ...]


class Refusal(msgspec.Struct, tag=True, frozen=True):
    """Answer in place of any other."""

    reason: Reason
    text: str


Message = (
    Hello
    | Locate
    | Located
    | Welcome
    | Meet
    | Met
    | Pull
    | Follow
    | News
    | Grant
    | Release
    | Released
    | Beat
    | Refusal
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class Wire:
    """One connection."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected

    def send(self, message: Message, seconds: float) -> None:
        """Write one frame. Raises WireError."""
        body = _encoder.encode(message)
        try:
            self._socket.settimeout(seconds)
            self._socket.sendall(len(body).to_bytes(_LENGTH_BYTES, "big") + body)
        except OSError as error:
            raise WireError(f"cannot write: {error}") from error

    def receive(self, seconds: float) -> Message:
        """Read one frame. Raises WireError, or TimeoutError when the deadline passes."""
        deadline = time.monotonic() + seconds
        length = int.from_bytes(self._read(_LENGTH_BYTES, deadline), "big")
        if length > _MAX_FRAME:
            raise WireError(f"frame of {length} bytes")
        try:
            return _decoder.decode(self._read(length, deadline))
        except msgspec.DecodeError as error:
            raise WireError("unreadable frame") from error

    def close(self) -> None:
        """Close the connection; a thread that reads from it ends with an error."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        finally:
            self._socket.close()

    def _read(self, length: int, deadline: float) -> bytes:
        body = bytearray()
        while len(body) < length:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("no whole message in time")
            try:
                self._socket.settimeout(left)
                part = self._socket.recv(min(length - len(body), 1 << 16))
            except TimeoutError:
                raise TimeoutError("no whole message in time") from None
            except OSError as error:
                raise WireError(f"cannot read: {error}") from error
            if not part:
                raise WireError("connection closed")
            body += part
        return bytes(body)
