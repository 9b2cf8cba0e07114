"""Proofs that both ends of a KV connection, or of a link, have the producer's key.

Used when a connection is opened (`authenticate_consumer` by servers, `connect_authenticated` by
clients) and when a two-sided link is made. The key never travels: each end sends a keyed hash
(HMAC-SHA-256) of random bytes that the other end has chosen. Once per connection, not per block.
A scheduler signs the numbers of cached blocks in the same way, for the ranks of its own engine.
The bytes that follow are neither encrypted nor signed.
"""

import hashlib
import hmac
import secrets
import time
from array import array
from collections.abc import Iterable

from cleave_worker.transfer.handoff import RefusalReason, RefusedError
from cleave_worker.transfer.protocol import (
    Challenge,
    ChallengeResponse,
    FramedConnection,
    Message,
    ProducerMac,
    ProtocolError,
    connect,
)

AUTHENTICATION_TIMEOUT_S = 5.0
"""A connection may wait this long without a proof; `KvServer` closes it earlier under pressure."""
_NONCE_BYTES = 32
_MAX_FRAME_BYTES = 256
"""Bytes that a stranger can make a server keep."""
_CONSUMER, _PRODUCER = b"consumer", b"producer"


def make_nonce() -> bytes:
    """Random bytes that were never used before."""
    return secrets.token_bytes(_NONCE_BYTES)


def compute_mac(key: str, *parts: bytes) -> bytes:
    """Keyed hash of parts of fixed lengths."""
    return hmac.new(key.encode(), b"".join(parts), hashlib.sha256).digest()


def compute_link_macs(key: str, nonce: bytes) -> tuple[bytes, bytes]:
    """What the producer and the consumer send over a new two-sided link."""
    return (
        compute_mac(key, b"link of the producer", nonce),
        compute_mac(key, b"link of the consumer", nonce),
    )


def compute_blocks_mac(secret: str, blocks: Iterable[int]) -> bytes:
    """Signature of a scheduler under the numbers of blocks that it has leased, for the ranks of its
    own engine, which have the same secret."""
    return compute_mac(secret, array("q", blocks).tobytes())


def connect_authenticated(address: tuple[str, int], key: str, seconds: float) -> FramedConnection:
    """Connect to a producer, with proofs if it has a key; each step may take `seconds`. Raises
    RefusedError."""
    connection = connect(address, seconds)
    if not key:
        return connection
    try:
        authenticate_producer(connection, key, seconds)
    except BaseException:
        connection.close()
        raise
    return connection


def authenticate_consumer(connection: FramedConnection, key: str) -> None:
    """Let a consumer prove that it has this engine's key, and prove the same to it. Raises
    ProtocolError, TimeoutError."""
    deadline = time.monotonic() + AUTHENTICATION_TIMEOUT_S
    nonce = make_nonce()
    connection.send(Challenge(nonce), AUTHENTICATION_TIMEOUT_S)
    response = connection.receive(deadline - time.monotonic(), _MAX_FRAME_BYTES)
    if not isinstance(response, ChallengeResponse) or len(response.nonce) != _NONCE_BYTES:
        raise ProtocolError("no response to the challenge")
    both = nonce, response.nonce
    if not hmac.compare_digest(response.mac, compute_mac(key, _CONSUMER, *both)):
        raise ProtocolError("the consumer does not have this engine's key")
    connection.send(ProducerMac(compute_mac(key, _PRODUCER, *both)), AUTHENTICATION_TIMEOUT_S)


def authenticate_producer(connection: FramedConnection, key: str, seconds: float) -> None:
    """Prove to a producer that this end has its key, and let it prove the same; each step may take
    `seconds`. Raises RefusedError."""
    try:
        challenge = connection.receive(seconds, _MAX_FRAME_BYTES)
        if not isinstance(challenge, Challenge) or len(challenge.nonce) != _NONCE_BYTES:
            raise ProtocolError("no challenge of the producer")
        both = challenge.nonce, make_nonce()
        mac = compute_mac(key, _CONSUMER, *both)
        connection.send(ChallengeResponse(both[1], mac), seconds)
        response: Message = connection.receive(seconds, _MAX_FRAME_BYTES)
    except TimeoutError as error:
        raise RefusedError(RefusalReason.TIME_OUT, str(error)) from error
    except ProtocolError as error:
        raise RefusedError(RefusalReason.PEER_LOST, str(error)) from error
    expected = compute_mac(key, _PRODUCER, *both)
    if not isinstance(response, ProducerMac) or not hmac.compare_digest(response.mac, expected):
        raise RefusedError(RefusalReason.PEER_LOST, "the producer does not have the handoff's key")
