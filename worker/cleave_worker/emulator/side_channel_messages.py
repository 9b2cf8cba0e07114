"""Messages of the KV side channel between two emulated engines, and their framing over TCP.

Replaces NIXL's handshake, reads and notifications: the consumer (decode side) requests block
contents, waits as long as the real transfer would take, and notifies the producer.
"""

import asyncio
import zlib

import msgspec

_LENGTH_BYTES = 4
_MAX_FRAME = 16 << 20


class SideChannelError(Exception):
    """The peer broke the protocol or closed the connection."""


class PullBlocks(msgspec.Struct, tag=True, frozen=True):
    """Request the contents of a leased request's blocks."""

    engine_id: str
    request_id: str
    block_ids: list[int]
    prompt_digest: bytes = b""
    """Hash of the consumer's prompt; empty: not given."""


class PullDone(msgspec.Struct, tag=True, frozen=True):
    """The blocks were read or will not be read: free them. No response."""

    engine_id: str
    request_id: str


class Heartbeat(msgspec.Struct, tag=True, frozen=True):
    """Extend the leases of requests that are still queued at the consumer. No response."""

    engine_id: str
    request_ids: list[str]


class BlockContents(msgspec.Struct, tag=True, frozen=True):
    """Response to `PullBlocks`: one content per block, in the requested order."""

    contents: list[int]
    checksum: int
    """Of what the producer's prefill wrote into them."""


class PullRefused(msgspec.Struct, tag=True, frozen=True):
    """Response to `PullBlocks` when the KV is not leased."""

    reason: str


class PullPrefix(msgspec.Struct, tag=True, frozen=True):
    """Request what the prefix cache has of blocks, and lease it; the response is `BlockContents` of
    the leading ones that are cached."""

    engine_id: str
    lease: str
    """The consumer's name for the lease."""
    keys: list[bytes]
    """Of blocks that follow each other. They depend on all tokens before, adapter and salt."""


class ReleasePrefix(msgspec.Struct, tag=True, frozen=True):
    """The blocks of this lease were read: free them."""

    engine_id: str
    lease: str


class PrefixReleased(msgspec.Struct, tag=True, frozen=True):
    """Response to `ReleasePrefix`."""

    is_valid: bool
    """Whether the lease has lasted until now; otherwise what was read must not be used."""


Message = (
    PullBlocks
    | PullDone
    | Heartbeat
    | BlockContents
    | PullRefused
    | PullPrefix
    | ReleasePrefix
    | PrefixReleased
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def compute_checksum(contents: list[int]) -> int:
    """Return the checksum of block contents in their order."""
    return zlib.crc32(_encoder.encode(contents))


def send(writer: asyncio.StreamWriter, message: Message) -> None:
    """Write one frame; the caller drains."""
    body = _encoder.encode(message)
    writer.write(len(body).to_bytes(_LENGTH_BYTES, "big") + body)


async def receive(reader: asyncio.StreamReader) -> Message:
    """Read one frame. Raises SideChannelError at the end of the stream or for an invalid frame."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
        if length > _MAX_FRAME:
            raise SideChannelError(f"frame of {length} bytes")
        return _decoder.decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise SideChannelError("connection closed") from error
    except msgspec.DecodeError as error:
        raise SideChannelError("unreadable frame") from error
