"""NIXL links: between two agents of this process, and with an owner that stands still or dies."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch comes with the engine")
pytest.importorskip("nixl", reason="NIXL comes with the worker extras")

from cleave_worker.transfer import client  # noqa: E402
from cleave_worker.transfer.handoff import RefusalReason, RefusedError  # noqa: E402
from cleave_worker.transfer.memory import ByteRange, Memory, RangeCopy  # noqa: E402
from cleave_worker.transfer.transport import LinkError, Transport  # noqa: E402
from cleave_worker.transfer.transports import nixl  # noqa: E402
from cleave_worker.transfer.transports.nixl_buffers import CHUNK_BYTES, StagingBuffers  # noqa: E402

from tests.support.kv_server_process import OwnerProcess, caches, register_kv  # noqa: E402

pytestmark = pytest.mark.usefixtures("over_tcp")
BOUND_S = 60.0
SIZE = 20 << 20
PEER = "boot-p/0"
PROMPT = [5, 6, 7, 8]


@pytest.fixture
def theirs() -> Memory:
    return Memory([torch.randint(1, 255, (SIZE,), dtype=torch.uint8) for _ in range(2)])


@pytest.fixture
def ours() -> Memory:
    return Memory([torch.zeros(SIZE, dtype=torch.uint8) for _ in range(2)])


@pytest.fixture
def link(theirs: Memory, ours: Memory) -> Iterator[nixl.NixlLink]:
    served = nixl.RegisteredRegions(PEER, theirs)
    nixl_link = linked(ours, arrivals(), served)
    yield nixl_link
    nixl_link.close()


def linked(ours: Memory, own: StagingBuffers, served: nixl.RegisteredRegions) -> nixl.NixlLink:
    reach = served.get_metadata()
    assert reach
    return nixl.NixlLink(ours, own, reach, PEER, BOUND_S)


def arrivals() -> StagingBuffers:
    return StagingBuffers("boot-d/0/reader", torch.device("cpu"))


MOVES = [
    RangeCopy(ByteRange(0, 5, 9 << 20), ByteRange(1, 7, 9 << 20)),
    RangeCopy(ByteRange(1, 15 << 20, 3), ByteRange(0, 0, 3)),
    RangeCopy(ByteRange(1, 0, CHUNK_BYTES), ByteRange(0, 100, CHUNK_BYTES)),
    RangeCopy(ByteRange(0, 1, 2), ByteRange(0, 10, 2)),
]
"""Scattered, and more than is under way at a time."""


def test_scattered_spans_are_read_and_nothing_else_is_touched(
    link: nixl.NixlLink, theirs: Memory, ours: Memory
) -> None:
    expected = [region.clone() for region in ours.regions]
    for source, here in MOVES:
        expected[here.region][here.offset : here.offset + here.length] = theirs.view(source)
    for _ in range(2):
        link.read(iter(MOVES), BOUND_S)
    assert all(map(torch.equal, ours.regions, expected))


@pytest.mark.parametrize(
    "move",
    [
        RangeCopy(ByteRange(0, SIZE, 1), ByteRange(0, 0, 1)),
        RangeCopy(ByteRange(9, 0, 1), ByteRange(0, 0, 1)),
        RangeCopy(ByteRange(0, 0, 1), ByteRange(0, SIZE, 1)),
    ],
    ids=["beyond their region", "no such region", "beyond own region"],
)
def test_a_span_that_is_not_there_is_an_error_and_the_end_of_the_link(
    link: nixl.NixlLink, ours: Memory, move: RangeCopy
) -> None:
    with pytest.raises(LinkError):
        link.read([move], BOUND_S)
    assert not any(region.any() for region in ours.regions)
    with pytest.raises(LinkError):
        link.read(MOVES, BOUND_S)


def test_an_agent_of_another_boot_is_refused(theirs: Memory, ours: Memory) -> None:
    served = nixl.RegisteredRegions("boot-before/0", theirs)
    with pytest.raises(LinkError, match="boot-before/0"):
        linked(ours, arrivals(), served)


def test_links_to_one_owner_do_not_end_each_other(theirs: Memory, ours: Memory) -> None:
    served, shared = nixl.RegisteredRegions(PEER, theirs), arrivals()
    first, second = (linked(ours, shared, served) for _ in range(2))
    first.close()
    first.close()
    second.read(MOVES, BOUND_S)
    second.close()
    assert not shared._uses, "the owner's agent is forgotten with the last link"
    third = linked(ours, shared, served)
    third.read(MOVES, BOUND_S)
    third.close()


def test_what_is_not_installed_is_left_out_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    ways = (Transport.SHARED_MEMORY, Transport.NIXL, Transport.GLOO)
    assert nixl.filter_installed(ways) == ways
    monkeypatch.setattr(nixl, "is_installed", lambda: False)
    assert nixl.filter_installed(ways) == (Transport.SHARED_MEMORY, Transport.GLOO)
    assert caplog.messages == [
        "NIXL is not installed: KV is transferred over shared memory or gloo"
    ]
    with pytest.raises(ValueError, match="install it"):
        nixl.filter_installed([Transport.NIXL])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nixl_is_tried_only_where_a_card_reads_memory_by_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str
) -> None:
    monkeypatch.delenv("UCX_TLS")
    monkeypatch.setattr(nixl, "_INFINIBAND_DEVICES", tmp_path / "absent")
    without = nixl.choose_transports(torch.device(device))
    assert Transport.NIXL not in without
    monkeypatch.setattr(nixl, "_INFINIBAND_DEVICES", tmp_path)
    assert nixl.choose_transports(torch.device(device)) == without
    (tmp_path / "mlx5_0").mkdir()
    assert nixl.choose_transports(torch.device(device)) == (
        *without[:-1],
        Transport.NIXL,
        without[-1],
    )


def test_where_nothing_but_tcp_is_left_nixl_is_not_used_unasked(
    start_owner: "Start", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UCX_TLS")
    owner, engine = start_owner(shared=False), Engine(BOUND_S, Transport.NIXL, Transport.GLOO)
    if any(nixl._INFINIBAND_DEVICES.glob("*")):
        pytest.skip("this machine has cards of its own")
    handoff = owner.hold("r", PROMPT, [3])
    assert engine.reader.pull(handoff, handoff.prompt_digest, 0, [3]) is Transport.GLOO
    assert engine.values(3) == written(3)
    engine.reader.close()


class Engine:
    """A decode engine with blocks of its own, whose reads may take this long."""

    def __init__(self, transfer_s: float, *ways: Transport) -> None:
        self.tensors = caches(0)
        registered = register_kv("boot-d", self.tensors)
        self.reader = client.KvClient(registered, ways or [Transport.NIXL], transfer_s)

    def pull(self, owner: OwnerProcess, request_id: str, block: int) -> None:
        handoff = owner.hold(request_id, PROMPT, [block])
        assert self.reader.pull(handoff, handoff.prompt_digest, 0, [block]) is Transport.NIXL

    def values(self, block: int) -> list[float]:
        return [layer[block, 0, 0, 0].item() for layer in self.tensors]


def written(block: int) -> list[float]:
    return [1000.0 + layer * 100 + block for layer in range(3)]


def untouched(block: int) -> list[float]:
    return [float(layer * 100 + block) for layer in range(3)]


Start = Callable[..., OwnerProcess]


def before_bytes(monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]) -> None:
    """Have something happen once between the owner's grant and the bytes."""
    move, left = client._RankConnection._transfer, [do]

    def disturbed(pair: client._RankConnection, *args: object) -> None:
        if left:
            left.pop()()
        move(pair, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(client._RankConnection, "_transfer", disturbed)


def test_bytes_that_come_after_their_reader_has_given_up_are_dropped(
    start_owner: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, engine = start_owner(shared=False), Engine(BOUND_S)
    engine.pull(owner, "first", 3)
    before_bytes(monkeypatch, lambda: stop(owner.process.pid))
    engine.reader.transfer_s = 0.5
    with pytest.raises(RefusedError) as caught:
        engine.pull(owner, "late", 4)
    assert caught.value.reason is RefusalReason.PEER_LOST
    assert not is_still(engine.reader.staging_buffers), "its buffer is nobody's"
    engine.reader.transfer_s = BOUND_S
    os.kill(owner.process.pid, signal.SIGCONT)
    owner.command("overwrite", block=4)
    until(lambda: is_still(engine.reader.staging_buffers))
    assert engine.values(4) == untouched(4)
    for block in (5, 6):
        engine.pull(owner, f"again-{block}", block)
        assert engine.values(block) == written(block)
    engine.reader.close()


def test_an_owner_that_dies_with_bytes_under_way_costs_a_buffer_and_no_other_owner(
    start_owner: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, other = start_owner(shared=False), start_owner(boot_id="boot-q", shared=False)
    engine = Engine(BOUND_S)
    engine.pull(owner, "first", 3)
    engine.pull(other, "second", 4)

    def die() -> None:
        owner.command("die")
        owner.process.join(BOUND_S)

    before_bytes(monkeypatch, die)
    with pytest.raises(RefusedError) as caught:
        engine.pull(owner, "lost", 5)
    assert caught.value.reason is RefusalReason.PEER_LOST
    assert engine.values(5) == untouched(5)
    engine.pull(other, "still", 6)
    assert engine.values(6) == written(6)
    assert set(engine.reader.staging_buffers._uses) == {"boot-q/0"}
    engine.reader.close()


def is_still(buffers: StagingBuffers) -> bool:
    """Whether nothing writes to any that is not lent."""
    with buffers._changed:
        buffers._reclaim()
        return not buffers._busy


def stop(pid: int) -> None:
    """Each thread stops at a moment of its own."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    until(
        lambda: all(
            (one / "stat").read_text().rpartition(")")[2].split()[0] == "T"
            for one in threads.iterdir()
        )
    )


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
