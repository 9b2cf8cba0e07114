"""The workers' half of the KV connector: two of them in this process, with real memory."""

import queue
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch comes with the engine")

from cleave_worker.transfer.holds import Begun, Held, Holds  # noqa: E402
from cleave_worker.transfer.identity import HandOff, Reason  # noqa: E402
from cleave_worker.transfer.link import Way  # noqa: E402
from cleave_worker.transfer.reader import Reader  # noqa: E402

from owner_process import caches, kept_as  # noqa: E402

pytestmark = [
    pytest.mark.vllm,
    # vLLM and what it imports warn of their own future.
    pytest.mark.filterwarnings("ignore"),
]
BOUND_S = 60.0


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    pytest.importorskip("vllm", reason="needs the worker-cpu extra")
    from cleave_worker.vllm.kv.worker import Settings, WorkerSide

    started: list[WorkerSide] = []

    def one(boot_id: str, tensors: list[Any], lease_s: float = BOUND_S) -> WorkerSide:
        ways = (Way.SHARED_MEMORY, Way.GLOO)
        settings = Settings(0, ways, lease_s, BOUND_S, check_bytes=True)
        started.append(WorkerSide(kept_as(boot_id, tensors), settings))
        return started[-1]

    yield one
    for each in started:
        each.close()


def orders(**told: Any) -> Any:
    from cleave_worker.vllm.kv.orders import Orders

    return Orders(**told)


def wanted(port: int, boot_id: str = "boot-p") -> Any:
    from cleave_worker.vllm.kv.orders import Wanted

    hand_off = HandOff(boot_id, "theirs", 1, "d", 32, (("127.0.0.1", port),))
    return Wanted(hand_off, "d", 0, (5, 6))


def received(side: Any) -> tuple[set[str], set[str]]:
    deadline = time.monotonic() + BOUND_S
    while not (ended := side.take_received())[0]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return ended


def test_a_pull_is_reported_once_and_frees_what_was_held(start: Callable[..., Any]) -> None:
    theirs, ours = caches(1000), caches(0)
    prefill, decode = start("boot-p", theirs), start("boot-d", ours)
    prefill.note(orders(hold={"theirs": Held(1, "d", (2, 9))}))
    decode.start({"mine": wanted(prefill.port)}, {})
    assert received(decode) == ({"mine"}, set())
    assert decode.take_received() == (set(), set())
    assert prefill.take_sent() == {"theirs"}
    assert prefill.take_sent() == set()
    for own, other in zip(ours, theirs, strict=True):
        assert torch.equal(own[5], other[2])
        assert torch.equal(own[6], other[9])
    (way,) = decode.take_transfers().data["bytes"]
    assert way == Way.SHARED_MEMORY


def test_a_refused_pull_is_reported_as_failed_with_its_reason(start: Callable[..., Any]) -> None:
    prefill, decode = start("boot-p", caches(1000)), start("boot-d", caches(0))
    decode.start({"mine": wanted(prefill.port, boot_id="before")}, {})
    assert received(decode) == ({"mine"}, {"mine"})
    assert decode.take_transfers().data["ended"] == {Reason.BOOT: 1}


def test_whatever_goes_wrong_the_request_hears_of_its_end(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*told: object) -> Way:
        raise KeyError("unforeseen")

    monkeypatch.setattr(Reader, "pull", broken)
    decode = start("boot-d", caches(0))
    decode.start({"mine": wanted(1)}, {})
    assert received(decode) == ({"mine"}, {"mine"})


def test_what_is_declined_or_expires_is_freed(start: Callable[..., Any]) -> None:
    prefill, decode = start("boot-p", caches(1000)), start("boot-d", caches(0))
    prefill.note(orders(hold={"theirs": Held(1, "d", (2, 9))}))
    decode.start({}, {"mine": wanted(prefill.port).hand_off})
    deadline = time.monotonic() + BOUND_S
    while not (freed := prefill.take_sent()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert freed == {"theirs"}
    assert prefill.take_transfers().is_empty()


def test_what_waits_for_its_turn_sends_heartbeats_until_it_was_pulled(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    beats: queue.SimpleQueue[tuple[str, ...]] = queue.SimpleQueue()
    monkeypatch.setattr(Holds, "extend", lambda self, ids: beats.put(tuple(ids)))
    prefill, decode = start("boot-p", caches(1000)), start("boot-d", caches(0), lease_s=0.3)
    prefill.note(orders(hold={"theirs": Held(1, "d", (2, 9))}))
    decode.note(orders(expect={"mine": wanted(prefill.port).hand_off}))
    assert beats.get(timeout=BOUND_S) == ("theirs",)
    decode.start({"mine": wanted(prefill.port)}, {})
    assert received(decode) == ({"mine"}, set())
    assert not decode._expected


def test_a_prefill_is_followed_from_its_first_step_to_its_hold(start: Callable[..., Any]) -> None:
    from cleave_worker.vllm.kv.orders import Chunk, Wanted

    theirs, ours = caches(1000), caches(0)
    prefill, decode = start("boot-p", theirs), start("boot-d", ours)
    ahead = HandOff("boot-p", "name", 0, "", 0, (("127.0.0.1", prefill.port),))
    decode.start({"mine": Wanted(ahead, "d", 0, (5, 6))}, {})
    prefill.note(orders(begin={"theirs": Begun(1, "d", 2, "name")}))
    for number, chunk in enumerate((Chunk((2,), 0, 1, False), Chunk((2, 9), 1, 2, True))):
        prefill.note(orders(compute={"theirs": chunk}))
        for plane in range(len(theirs)):
            prefill.layer_done(plane)
        assert number == 0 or prefill.take_sent() == set()
        prefill.step_done()
    prefill.note(orders(hold={"theirs": Held(1, "d", (2, 9))}))
    assert received(decode) == ({"mine"}, set())
    assert prefill.take_sent() == {"theirs"}
    for own, other in zip(ours, theirs, strict=True):
        assert torch.equal(own[5], other[2])
        assert torch.equal(own[6], other[9])


def test_a_prefill_that_is_given_up_fails_its_follower(start: Callable[..., Any]) -> None:
    from cleave_worker.vllm.kv.orders import Wanted

    prefill, decode = start("boot-p", caches(1000)), start("boot-d", caches(0))
    ahead = HandOff("boot-p", "name", 0, "", 0, (("127.0.0.1", prefill.port),))
    prefill.note(orders(begin={"theirs": Begun(1, "d", 2, "name")}))
    decode.start({"mine": Wanted(ahead, "d", 0, (5, 6))}, {})
    prefill.note(orders(give_up={"theirs"}))
    assert received(decode) == ({"mine"}, {"mine"})
    assert prefill.take_sent() == set()
