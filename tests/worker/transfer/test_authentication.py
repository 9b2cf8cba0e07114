"""Who has not the key of a producer gets no byte of KV and holds no place for long."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import msgspec
import pytest

torch = pytest.importorskip("torch", reason="torch comes with the engine")

from cleave_worker.transfer import authentication, client, protocol  # noqa: E402
from cleave_worker.transfer.authentication import connect_authenticated  # noqa: E402
from cleave_worker.transfer.block_leases import BlockLeases, FinishedPrefill  # noqa: E402
from cleave_worker.transfer.handoff import Handoff, RefusalReason, RefusedError  # noqa: E402
from cleave_worker.transfer.server import KvServer  # noqa: E402
from cleave_worker.transfer.sharding import ParallelShape, ShardPart, ShardSource  # noqa: E402
from cleave_worker.transfer.transport import Transport  # noqa: E402

from tests.support.kv_server_process import (  # noqa: E402
    KEY,
    LAYERS,
    LAYOUT,
    OwnerProcess,
    caches,
    register_kv,
)

BOUND_S = 30.0
HANDSHAKE = protocol.HandshakeRequest(
    "boot-p", LAYOUT, ParallelShape(), ShardSource(0, ShardPart(0, LAYERS, 0, 2), 1), "boot-d", 0
)
FIRST_REQUESTS = [
    HANDSHAKE,
    protocol.RanksRequest("boot-p"),
    protocol.ReleaseBlocks("r", 1),
    protocol.LeaseHeartbeat(("r",)),
    protocol.ChallengeResponse(bytes(32), bytes(32)),
    protocol.ChallengeResponse(b"", b""),
]


@pytest.fixture
def producer() -> Iterator[tuple[KvServer, BlockLeases]]:
    """A producer with a key that holds a prompt, in this process."""
    leases = BlockLeases(BOUND_S, BOUND_S)
    leases.grant("r", FinishedPrefill(1, "d", (3,)))
    server = KvServer(register_kv("boot-p", caches(1000), key=KEY), leases, (), 0, BOUND_S)
    yield server, leases
    server.close()


@pytest.fixture
def reader() -> Iterator[client.KvClient]:
    """A consumer over gloo."""
    kv = register_kv("boot-d", caches(0))
    with closing(client.KvClient(kv, [Transport.GLOO], BOUND_S)) as made:
        yield made


def read_all(connected: socket.socket) -> bytes:
    """What arrives until the end of the connection, but for the challenge."""
    connected.settimeout(BOUND_S)
    received = b""
    while piece := connected.recv(1 << 16):
        received += piece
    return received[4 + int.from_bytes(received[:4], "big") :]


@pytest.mark.parametrize("request_", FIRST_REQUESTS, ids=lambda each: type(each).__name__)
def test_a_stranger_gets_nothing_but_a_challenge(producer, request_: protocol.Message) -> None:
    server, leases = producer
    with socket.create_connection(("127.0.0.1", server.port), BOUND_S) as connected:
        protocol.FramedConnection(connected).send(request_, BOUND_S)
        assert read_all(connected) == b""
    assert leases.num_leased == 1, "nothing was released"


def test_a_large_frame_of_a_stranger_is_not_read(producer) -> None:
    server, _ = producer
    with socket.create_connection(("127.0.0.1", server.port), BOUND_S) as connected:
        connected.sendall((1 << 20).to_bytes(4, "big"))
        assert read_all(connected) == b""


def test_a_silent_stranger_is_shut_out_in_time(producer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "AUTHENTICATION_TIMEOUT_S", 0.3)
    server, _ = producer
    started = time.monotonic()
    with socket.create_connection(("127.0.0.1", server.port), BOUND_S) as connected:
        connected.sendall(b"\0\0")
        assert read_all(connected) == b""
    assert time.monotonic() - started < BOUND_S / 2


def test_a_proof_is_of_no_use_on_another_connection(producer) -> None:
    server, _ = producer
    address = ("127.0.0.1", server.port)
    sent: list[protocol.Message] = []
    real = protocol.FramedConnection.send

    def record(self: protocol.FramedConnection, message: protocol.Message, seconds: float) -> None:
        sent.append(message)
        real(self, message, seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocol.FramedConnection, "send", record)
        connect_authenticated(address, KEY, BOUND_S).close()
    proof = next(each for each in sent if isinstance(each, protocol.ChallengeResponse))
    with socket.create_connection(address, BOUND_S) as connected:
        protocol.FramedConnection(connected).send(proof, BOUND_S)
        assert read_all(connected) == b""


@pytest.mark.parametrize("key", ["", "another"])
def test_a_consumer_without_the_key_is_refused(
    key: str, reader: client.KvClient, start_owner: Callable[..., OwnerProcess]
) -> None:
    owner = start_owner(shared=False)
    handoff = owner.hold("r", [5, 6, 7, 8], [3])
    before = [region.clone() for region in reader.kv.memory.regions]
    with pytest.raises(RefusedError) as refused:
        reader.pull(msgspec.structs.replace(handoff, key=key), handoff.prompt_digest, 0, [3])
    assert refused.value.reason is RefusalReason.PEER_LOST
    assert all(map(torch.equal, reader.kv.memory.regions, before))
    assert reader.pull(handoff, handoff.prompt_digest, 0, [3]) is Transport.GLOO


def test_a_producer_that_does_not_know_the_key_is_not_believed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            connection = protocol.FramedConnection(listener.accept()[0])
            connection.send(protocol.Challenge(bytes(32)), BOUND_S)
            connection.receive(BOUND_S)
            connection.send(protocol.ProducerMac(bytes(32)), BOUND_S)
            connection.close()

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(RefusedError, match="does not have the handoff's key"):
            connect_authenticated(listener.getsockname(), KEY, BOUND_S)
        thread.join(BOUND_S)


def test_a_producer_without_a_key_serves_as_before(
    reader: client.KvClient, start_owner: Callable[..., OwnerProcess]
) -> None:
    owner = start_owner(key="", shared=False)
    handoff = owner.hold("r", [5, 6, 7, 8], [3])
    assert reader.pull(handoff, handoff.prompt_digest, 0, [3]) is Transport.GLOO


def test_the_key_is_in_no_text_of_a_connection(
    reader: client.KvClient, start_owner: Callable[..., OwnerProcess]
) -> None:
    handoff: Handoff = start_owner().hold("r", [5], [3])
    assert KEY not in f"{reader.resolve_ranks(handoff)}{reader.kv}{handoff}"
