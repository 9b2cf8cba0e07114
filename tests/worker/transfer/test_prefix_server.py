"""Leases of cached blocks: who gets them, what ends them, and what a reader may use of them."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import msgspec
import pytest

torch = pytest.importorskip("torch", reason="torch comes with the engine")

from cleave_worker.transfer import prefix_client  # noqa: E402
from cleave_worker.transfer.block_leases import BlockLeases  # noqa: E402
from cleave_worker.transfer.client import KvClient  # noqa: E402
from cleave_worker.transfer.handoff import RefusalReason, RefusedError  # noqa: E402
from cleave_worker.transfer.prefix_client import (  # noqa: E402
    LeasedPrefix,
    PrefixRead,
    SourceAddress,
    check_lease,
    request_prefix,
)
from cleave_worker.transfer.prefix_server import PrefixOffer, PrefixServer  # noqa: E402
from cleave_worker.transfer.progress import NO_PROGRESS  # noqa: E402
from cleave_worker.transfer.protocol import (  # noqa: E402
    PrefixRequest,
    ProgressRequest,
    connect,
)
from cleave_worker.transfer.server import KvServer  # noqa: E402
from cleave_worker.transfer.sharding import ParallelShape  # noqa: E402
from cleave_worker.transfer.transport import Transport  # noqa: E402
from cleave_worker.transfer.transports.shared_memory import share_memory  # noqa: E402

from tests.support.kv_server_process import KEY, caches, register_kv  # noqa: E402

BOUND_S = 30.0
SECRET = "shared by the scheduler and its ranks"
KEYS = (b"a", b"ab", b"abc", b"abcd")


class Cache:
    """A prefix cache that has the first three of KEYS."""

    def __init__(self) -> None:
        self.blocks = dict(zip(KEYS[:3], (7, 2, 9), strict=True))
        self.leased: list[int] = []

    def acquire(self, keys: Sequence[bytes]) -> tuple[int, ...]:
        found = []
        for key in keys:
            if key not in self.blocks:
                break
            found.append(self.blocks[key])
        self.leased += found
        return tuple(found)

    def release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.leased.remove(block)


class Engine:
    """A scheduler that leases, and its only rank."""

    def __init__(self, way: Transport, lease_s: float) -> None:
        self.tensors = caches(1000)
        kv = register_kv("boot-s", self.tensors, key=KEY)
        shared = share_memory(kv.memory) if way is Transport.SHARED_MEMORY else ()
        self.rank = KvServer(kv, BlockLeases(BOUND_S, BOUND_S), shared, 0, BOUND_S)
        self.rank.prefix_secret = SECRET
        self.cache = Cache()
        addresses = (("127.0.0.1", self.rank.port),)
        offer = PrefixOffer("boot-s", ParallelShape(), addresses, SECRET, KEY)
        self.scheduler = PrefixServer("127.0.0.1", 0, offer, self.cache, lease_s)
        self.source = SourceAddress("boot-s", "127.0.0.1", self.scheduler.port, KEY)

    def close(self) -> None:
        self.scheduler.close()
        self.rank.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Engine]]:
    started: list[Engine] = []

    def one(way: Transport = Transport.SHARED_MEMORY, lease_s: float = BOUND_S) -> Engine:
        started.append(Engine(way, lease_s))
        return started[-1]

    yield one
    for each in started:
        each.close()


@pytest.fixture
def read_with() -> Iterator[Callable[..., list[torch.Tensor]]]:
    """Read with a reader of its own; returns its KV."""
    made: list[KvClient] = []

    def read(task: PrefixRead, way: Transport, *, expect: RefusalReason | None = None) -> object:
        tensors = caches(0)
        made.append(KvClient(register_kv("boot-r", tensors), [way], BOUND_S, check_bytes=True))
        if expect is None:
            assert made[-1].pull_prefix(task) is way
            return tensors
        with pytest.raises(RefusedError) as refused:
            made[-1].pull_prefix(task)
        assert refused.value.reason is expect
        return tensors

    yield read
    for each in made:
        each.close()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def build_read(prefix: LeasedPrefix, skipped: int, *local: int) -> PrefixRead:
    return PrefixRead(prefix.source, prefix.lease, skipped, local)


@pytest.mark.parametrize("way", [Transport.SHARED_MEMORY, Transport.CUDA_IPC, Transport.GLOO])
def test_the_cached_beginning_is_leased_read_and_freed(way: Transport, start, read_with) -> None:
    engine = start(way)
    prefix = request_prefix(engine.source, KEYS)
    assert prefix.lease.blocks == (7, 2, 9)
    assert sorted(engine.cache.leased) == [2, 7, 9]
    # This engine has the first one by now.
    own = read_with(build_read(prefix, 1, 5, 6), way)
    for mine, theirs in zip(own, engine.tensors, strict=True):
        assert torch.equal(mine[5], theirs[2])
        assert torch.equal(mine[6], theirs[9])
    assert engine.cache.leased, "the scheduler of the reader ends the lease"
    prefix.end()
    wait_until(lambda: not engine.cache.leased)


def test_an_empty_lease_is_an_answer(start) -> None:
    engine = start()
    prefix = request_prefix(engine.source, KEYS[3:])
    assert prefix.lease.blocks == ()
    prefix.end()
    assert not engine.cache.leased


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"engine_id": "before"}, RefusalReason.BOOT),
        ({"key": "another"}, RefusalReason.PEER_LOST),
        ({"port": 1}, RefusalReason.PEER_LOST),
        ({"port": 1 << 17}, RefusalReason.PEER_LOST),
    ],
)
def test_a_wrong_source_is_refused(changed, reason: RefusalReason, start) -> None:
    engine = start()
    source = msgspec.structs.replace(engine.source, **changed)
    for call in (lambda: request_prefix(source, KEYS), lambda: check_lease(source, 1)):
        with pytest.raises(RefusedError) as refused:
            call()
        if reason is not RefusalReason.BOOT:
            assert refused.value.reason is reason
    with pytest.raises(RefusedError) as refused:
        request_prefix(source, KEYS)
    assert refused.value.reason is reason
    assert not engine.cache.leased


@pytest.mark.parametrize(("lease_s", "is_ended"), [(BOUND_S, True), (0.1, False)])
def test_what_is_read_after_the_lease_is_not_used(
    lease_s: float, is_ended: bool, start, read_with
) -> None:
    engine = start(lease_s=lease_s)
    prefix = request_prefix(engine.source, KEYS)
    if is_ended:
        prefix.end()
    wait_until(lambda: not engine.cache.leased)
    task = build_read(prefix, 0, 4, 5, 6)
    read_with(task, Transport.SHARED_MEMORY, expect=RefusalReason.LAPSED)
    prefix.end()


def test_ranks_send_only_what_their_scheduler_has_leased(start, read_with) -> None:
    engine = start(Transport.GLOO)
    prefix = request_prefix(engine.source, KEYS)
    forged = msgspec.structs.replace(prefix.lease, blocks=(7, 2, 10))
    task = PrefixRead(prefix.source, forged, 0, (4, 5, 6))
    read_with(task, Transport.GLOO, expect=RefusalReason.NOT_HELD)
    unsigned = msgspec.structs.replace(prefix.lease, blocks_mac=b"")
    task = PrefixRead(prefix.source, unsigned, 0, (4, 5, 6))
    read_with(task, Transport.GLOO, expect=RefusalReason.NOT_HELD)
    # Before the engine's first step its ranks do not know the secret.
    engine.rank.prefix_secret = ""
    task = build_read(prefix, 0, 4, 5, 6)
    read_with(task, Transport.GLOO, expect=RefusalReason.NOT_HELD)
    prefix.end()


def test_more_than_is_leased_is_not_read(start, read_with) -> None:
    engine = start()
    prefix = request_prefix(engine.source, KEYS)
    task = build_read(prefix, 2, 4, 5)
    read_with(task, Transport.SHARED_MEMORY, expect=RefusalReason.MALFORMED)
    prefix.end()


def test_an_engine_does_not_read_from_itself(start) -> None:
    engine = start()
    prefix = request_prefix(engine.source, KEYS)
    kv = register_kv("boot-s", caches(0))
    with (
        closing(KvClient(kv, [Transport.GLOO], BOUND_S)) as client,
        pytest.raises(RefusedError) as refused,
    ):
        client.pull_prefix(build_read(prefix, 0, 4, 5, 6))
    assert refused.value.reason is RefusalReason.BOOT
    prefix.end()


def test_a_lease_with_more_blocks_than_requested_is_refused(
    start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()

    def lease_too_many(keys: Sequence[bytes]) -> tuple[int, ...]:
        blocks = (7,) * (len(keys) + 1)
        engine.cache.leased += blocks
        return blocks

    monkeypatch.setattr(engine.cache, "acquire", lease_too_many)
    with pytest.raises(RefusedError) as refused:
        request_prefix(engine.source, KEYS)
    assert refused.value.reason is RefusalReason.MALFORMED


def test_a_source_that_does_not_respond_is_given_up(start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_client, "_RESPONSE_TIMEOUT_S", 0.3)
    engine, go_on = start(), threading.Event()

    def hang(keys: Sequence[bytes]) -> tuple[int, ...]:
        go_on.wait(BOUND_S)
        return ()

    monkeypatch.setattr(engine.cache, "acquire", hang)
    with pytest.raises(RefusedError) as refused:
        request_prefix(engine.source, KEYS)
    assert refused.value.reason is RefusalReason.TIME_OUT
    go_on.set()


@pytest.mark.parametrize(
    "message", [PrefixRequest("boot-s", KEYS), ProgressRequest("n", "d", NO_PROGRESS)]
)
def test_a_stranger_leases_nothing(message, start) -> None:
    engine = start()
    with closing(connect(("127.0.0.1", engine.scheduler.port), BOUND_S)) as connection:
        connection.send(message, BOUND_S)
        connection.receive(BOUND_S)
        with pytest.raises(OSError, match="closed"):
            connection.receive(BOUND_S)
    assert not engine.cache.leased


def test_the_key_is_in_no_log() -> None:
    assert KEY not in repr(SourceAddress("e", "h", 1, KEY))
    assert KEY not in repr(PrefixOffer("e", ParallelShape(), (), SECRET, KEY))
    assert SECRET not in repr(PrefixOffer("e", ParallelShape(), (), SECRET, KEY))
