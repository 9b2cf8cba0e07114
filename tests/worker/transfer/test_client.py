"""Hand-offs between processes: what goes well, and every way in which they fail."""

import errno
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

torch = pytest.importorskip("torch", reason="torch comes with the engine")

from cleave_worker.transfer import client, protocol  # noqa: E402
from cleave_worker.transfer.authentication import connect_authenticated  # noqa: E402
from cleave_worker.transfer.block_leases import BlockLeases, FinishedPrefill  # noqa: E402
from cleave_worker.transfer.handoff import Handoff, KvLayout, RefusalReason, RefusedError  # noqa: E402
from cleave_worker.transfer.server import KvServer  # noqa: E402
from cleave_worker.transfer.sharding import ParallelShape, ShardPart, ShardSource  # noqa: E402
from cleave_worker.transfer.transport import Transport  # noqa: E402
from cleave_worker.transfer.transports import shared_memory  # noqa: E402

from tests.support.kv_server_process import (  # noqa: E402
    BLOCKS,
    LAYERS,
    LAYOUT,
    OwnerProcess,
    caches,
    register_kv,
)

Start = Callable[..., OwnerProcess]
BOUND_S = 60.0
PROMPT = [5, 6, 7, 8]
WAYS = [Transport.SHARED_MEMORY, Transport.GLOO]


class Engine:
    """The decode side: own KV, and a reader."""

    def __init__(
        self, *ways: Transport, check_bytes: bool = False, layout: KvLayout = LAYOUT
    ) -> None:
        self.tensors = caches(0)
        registered = replace(register_kv("boot-d", self.tensors), layout=layout)
        self.reader = client.KvClient(registered, ways or WAYS, BOUND_S, check_bytes=check_bytes)

    def pull(self, handoff: Handoff, blocks: list[int], first: int = 0) -> Transport:
        return self.reader.pull(handoff, handoff.prompt_digest, first, blocks)

    def refused(self, handoff: Handoff, blocks: list[int]) -> RefusalReason:
        with pytest.raises(RefusedError) as caught:
            self.pull(handoff, blocks)
        return caught.value.reason

    def values(self, block: int) -> list[float]:
        return [layer[block, 0, 0, 0].item() for layer in self.tensors]


def written(block: int) -> list[float]:
    """What the owner's prefill wrote, by layer."""
    return [1000.0 + layer * 100 + block for layer in range(LAYERS)]


@pytest.fixture
def engines() -> Iterator[Callable[..., Engine]]:
    started: list[Engine] = []

    def make(*ways: Transport, **settings: object) -> Engine:
        started.append(Engine(*ways, **settings))  # type: ignore[arg-type]
        return started[-1]

    yield make
    for one in started:
        one.reader.close()


Make = Callable[..., Engine]


def test_blocks_arrive_where_they_belong_and_are_freed(
    start_owner: Start, engines: Make, way: Transport, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    owner, engine = start_owner(), engines(way, check_bytes=True)
    handoff = owner.hold("r", PROMPT, [3, 4, 9])
    assert engine.pull(handoff, [10, 11, 2]) is way
    for source, here in ((3, 10), (4, 11), (9, 2)):
        assert engine.values(here) == written(source)
    assert engine.values(5) == caches_value(5), "no other block is touched"
    assert owner.command("freed") == {"freed": ["r"], "held": 0}
    (line,) = [line for line in caplog.messages if "GB/s" in line]
    assert line.startswith(f"KV from boot-p arrives over {way} at ")


def caches_value(block: int) -> list[float]:
    return [float(layer * 100 + block) for layer in range(LAYERS)]


def test_what_a_prefix_cache_has_is_not_pulled(
    start_owner: Start, engines: Make, way: Transport
) -> None:
    owner, engine = start_owner(), engines(way)
    engine.pull(owner.hold("r", PROMPT, [3, 4, 9]), [7], first=2)
    assert engine.values(7) == written(9)


def test_the_best_working_transport_is_used(start_owner: Start, engines: Make) -> None:
    owner, engine = start_owner(shared=False), engines()
    assert engine.pull(owner.hold("r", PROMPT, [1]), [1]) is Transport.GLOO


def test_many_requests_of_many_owners_side_by_side(start_owner: Start, engines: Make) -> None:
    owners = [start_owner(boot_id="boot-a"), start_owner(boot_id="boot-b", shared=False)]
    engine = engines()
    jobs = [
        threading.Thread(
            target=engine.pull, args=(owners[n % 2].hold(f"r{n}", [n], [n]), [n]), daemon=True
        )
        for n in range(BLOCKS)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(BOUND_S)
    assert [engine.values(n) for n in range(BLOCKS)] == [written(n) for n in range(BLOCKS)]


MISMATCHES: list[tuple[dict[str, object], RefusalReason]] = [
    ({"boot_id": "boot-before"}, RefusalReason.BOOT),
    ({"epoch": 2}, RefusalReason.EPOCH),
    ({"request_id": "other"}, RefusalReason.NOT_HELD),
    ({"prompt_digest": "0" * 32}, RefusalReason.PROMPT),
    ({"addresses": (("127.0.0.1", 1),)}, RefusalReason.PEER_LOST),
    ({"addresses": ()}, RefusalReason.LAYOUT),
    ({"addresses": (("no such host", 1),)}, RefusalReason.PEER_LOST),
    ({"boot_id": "boot-d"}, RefusalReason.BOOT),
]


def test_a_handoff_that_does_not_match_is_refused_and_nothing_moves(
    start_owner: Start, engines: Make
) -> None:
    owner, engine = start_owner(), engines()
    handoff = owner.hold("r", PROMPT, [3])
    for changed, reason in MISMATCHES:
        assert engine.refused(msgspec.structs.replace(handoff, **changed), [3]) is reason
        assert engine.values(3) == caches_value(3)
    assert engine.pull(handoff, [3]), "the true one still works"


def test_kv_of_another_prompt_is_refused_by_the_reader_itself(
    start_owner: Start, engines: Make
) -> None:
    owner, engine = start_owner(), engines()
    handoff = owner.hold("r", PROMPT, [3])
    with pytest.raises(RefusedError) as caught:
        engine.reader.pull(handoff, "digest of other tokens", 0, [3])
    assert caught.value.reason is RefusalReason.PROMPT


def test_another_layout_is_refused_and_named(start_owner: Start, engines: Make) -> None:
    handoff = start_owner().hold("r", PROMPT, [3])
    for field in LAYOUT.__struct_fields__:
        value = "x" if isinstance(getattr(LAYOUT, field), str) else 99
        engine = engines(layout=msgspec.structs.replace(LAYOUT, **{field: value}))
        with pytest.raises(RefusedError, match=field) as caught:
            engine.pull(handoff, [3])
        assert caught.value.reason is RefusalReason.LAYOUT


def test_a_handoff_serves_once(start_owner: Start, engines: Make, way: Transport) -> None:
    owner, engine = start_owner(), engines(way)
    handoff = owner.hold("r", PROMPT, [3])
    engine.pull(handoff, [3])
    assert engine.refused(handoff, [4]) is RefusalReason.NOT_HELD
    assert engine.values(4) == caches_value(4)


def test_more_blocks_than_are_held_is_refused_and_the_connection_lives(
    start_owner: Start, engines: Make
) -> None:
    owner, engine = start_owner(), engines()
    handoff = owner.hold("r", PROMPT, [3])
    assert engine.refused(handoff, [3, 4]) is RefusalReason.MALFORMED
    engine.pull(handoff, [3])


def test_a_handoff_after_its_lease_is_refused(start_owner: Start, engines: Make) -> None:
    owner, engine = start_owner(lease_s=0.01), engines()
    handoff = owner.hold("r", PROMPT, [3])
    until(lambda: owner.command("freed")["freed"])
    assert engine.refused(handoff, [3]) is RefusalReason.NOT_HELD


def test_heartbeats_keep_a_handoff(start_owner: Start, engines: Make) -> None:
    owner, engine = start_owner(lease_s=9.0), engines()
    handoff, other = owner.hold("r", PROMPT, [3]), owner.hold("s", PROMPT, [4])

    def beaten() -> bool:
        assert engine.reader.send_heartbeats([handoff]) == 0
        return "s" in owner.command("freed")["freed"]

    until(beaten)
    engine.pull(handoff, [3])
    assert engine.refused(other, [4]) is RefusalReason.NOT_HELD


def test_owners_that_are_gone_or_silent_do_not_end_the_heartbeats_of_others(
    start_owner: Start, engines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_HEARTBEAT_TIMEOUT_S", 0.5)
    dead, owner, engine = start_owner(boot_id="boot-dead"), start_owner(), engines()
    gone = dead.hold("g", PROMPT, [3])
    dead.end()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = ("127.0.0.1", silent.getsockname()[1])
        mute = Handoff("boot-mute", "m", 1, "d", 4, (address,))
        assert engine.reader.send_heartbeats([gone, mute, owner.hold("r", PROMPT, [3])]) == 2


def test_a_declined_handoff_is_freed_at_once(start_owner: Start, engines: Make) -> None:
    owner, engine = start_owner(), engines()
    engine.reader.decline(owner.hold("r", PROMPT, [3]))
    assert owner.command("freed") == {"freed": ["r"], "held": 0}


def test_what_was_read_after_the_owner_gave_it_up_is_void(
    start_owner: Start, engines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, engine = start_owner(reading_s=0.01), engines()
    read = shared_memory.SharedMemoryLink.read

    def late(link: shared_memory.SharedMemoryLink, *args: object) -> None:
        until(lambda: owner.command("freed")["freed"])
        owner.command("overwrite", block=3)
        read(link, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(shared_memory.SharedMemoryLink, "read", late)
    assert engine.refused(owner.hold("r", PROMPT, [3]), [3]) is RefusalReason.LAPSED


def test_bytes_that_changed_on_the_way_are_noticed(
    start_owner: Start, engines: Make, way: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, engine = start_owner(), engines(way, check_bytes=True)
    move = client._RankConnection._transfer

    def damage(
        pair: client._RankConnection, grant: protocol.PullResponse, blocks: list[int], layers: slice
    ) -> None:
        move(pair, grant, blocks, layers)
        engine.tensors[1][blocks[-1]].view(-1)[17] += 1

    monkeypatch.setattr(client._RankConnection, "_transfer", damage)
    assert engine.refused(owner.hold("r", PROMPT, [3, 4]), [3, 4]) is RefusalReason.CHECKSUM
    assert owner.command("freed")["held"] == 0


def test_an_owner_that_dies_while_it_sends_is_an_error(
    start_owner: Start, engines: Make, way: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, engine = start_owner(), engines(way)
    engine.pull(owner.hold("first", PROMPT, [3]), [3])
    move = client._RankConnection._transfer

    def bereaved(pair: client._RankConnection, *args: object) -> None:
        owner.command("die")
        owner.process.join(BOUND_S)
        move(pair, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(client._RankConnection, "_transfer", bereaved)
    handoff = owner.hold("r", PROMPT, [4])
    assert engine.refused(handoff, [4]) is RefusalReason.PEER_LOST
    assert engine.refused(handoff, [4]) is RefusalReason.PEER_LOST


def test_an_owner_that_stands_still_costs_a_bounded_time(
    start_owner: Start, engines: Make, way: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, engine = start_owner(), engines(way)
    engine.pull(owner.hold("first", PROMPT, [3]), [3])
    handoff = owner.hold("r", PROMPT, [4])
    monkeypatch.setattr(protocol, "RESPONSE_TIMEOUT_S", 0.3)
    os.kill(owner.process.pid, signal.SIGSTOP)
    until(lambda: states_of(owner.process.pid) == {"T"})
    assert engine.refused(handoff, [4]) is RefusalReason.TIME_OUT
    os.kill(owner.process.pid, signal.SIGCONT)
    # The reader has left, so what it had requested is freed once that is noticed.
    until(lambda: owner.command("freed")["held"] == 0)


def states_of(pid: int) -> set[str]:
    """States of all threads: each of them stops at a moment of its own."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return {(thread / "stat").read_text().rpartition(")")[2].split()[0] for thread in threads}


def test_a_connection_that_was_idle_too_long_is_reopened(start_owner: Start, engines: Make) -> None:
    owner, engine = start_owner(), engines()
    engine.pull(owner.hold("r", PROMPT, [3]), [3])
    (pair,) = engine.reader._connections.values()
    assert pair._connection
    pair._connection.close()
    engine.pull(owner.hold("s", PROMPT, [4]), [4])
    assert engine.values(4) == written(4)


@pytest.mark.parametrize(
    "answer", [b"", b"\0\0\0", b"\0\0\0\x09truncated"[:9], b"\xff\xff\xff\xff", b"\0\0\0\x03abc"]
)
def test_an_owner_that_talks_nonsense_is_an_error(engines: Make, answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connected, _ = listening.accept()
            with connected:
                connected.recv(1 << 16)
                connected.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        port = listening.getsockname()[1]
        handoff = Handoff("boot-p", "r", 1, "d", 4, (("127.0.0.1", port),))
        assert engines().refused(handoff, [3]) is RefusalReason.PEER_LOST


@pytest.mark.parametrize(
    "greeting", [b"", b"\0\0\0\x03abc", b"\xff\xff\xff\xff", b"GET / HTTP/1.1"]
)
def test_a_reader_that_talks_nonsense_does_not_disturb_others(
    start_owner: Start, engines: Make, greeting: bytes
) -> None:
    owner, engine = start_owner(), engines()
    with socket.create_connection(("127.0.0.1", owner.port)) as connected:
        connected.sendall(greeting)
        engine.pull(owner.hold("r", PROMPT, [3]), [3])


def test_a_reader_that_leaves_in_the_middle_frees_what_it_read(
    start_owner: Start, engines: Make
) -> None:
    owner = start_owner()
    handoff = owner.hold("r", PROMPT, [3])
    address = "127.0.0.1", owner.port
    with closing(connect_authenticated(address, owner.key, BOUND_S)) as connection:
        source = ShardSource(0, ShardPart(0, LAYERS, 0, 2), 1)
        hello = protocol.HandshakeRequest("boot-p", LAYOUT, ParallelShape(), source, "boot-d", 0)
        connection.send(hello, BOUND_S)
        connection.receive(BOUND_S)
        pull = protocol.PullRequest(
            "r", 1, handoff.prompt_digest, 0, 1, send=False, checksums=False
        )
        connection.send(pull, BOUND_S)
        assert isinstance(connection.receive(BOUND_S), protocol.PullResponse)
    until(lambda: owner.command("freed")["held"] == 0)


def test_an_owner_that_could_not_accept_a_reader_serves_the_next(
    engines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, failures = socket.socket.accept, [OSError(errno.EMFILE, "too many open files")]

    def scarce(listening: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise failures.pop()
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", scarce)
    holds = BlockLeases(BOUND_S, BOUND_S)
    holds.grant("r", FinishedPrefill(1, "d", (3,)))
    owner = KvServer(register_kv("boot-p", caches(1000)), holds, (), 0, BOUND_S)
    engine = engines()
    try:
        handoff = Handoff("boot-p", "r", 1, "d", 4, (("127.0.0.1", owner.port),))
        assert engine.pull(handoff, [3]) is Transport.GLOO
    finally:
        owner.close()
    assert not failures
    assert engine.values(3) == written(3)


def test_readers_that_say_nothing_do_not_keep_others_out(
    engines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cleave_worker.transfer.listener._MAX_CONSUMERS", 4)
    holds = BlockLeases(BOUND_S, BOUND_S)
    for name in ("r", "s"):
        holds.grant(name, FinishedPrefill(1, "d", (3,)))
    owner = KvServer(register_kv("boot-p", caches(1000)), holds, (), 0, BOUND_S)
    engine, silent = engines(), []
    try:
        for name in ("r", "s"):
            silent += [socket.create_connection(("127.0.0.1", owner.port)) for _ in range(8)]
            started = time.monotonic()
            handoff = Handoff("boot-p", name, 1, "d", 4, (("127.0.0.1", owner.port),))
            assert engine.pull(handoff, [3]) is Transport.GLOO
            assert time.monotonic() - started < 5
    finally:
        owner.close()
        for each in silent:
            each.close()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
