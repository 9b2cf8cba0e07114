"""Prefixes that waiting requests pull: when the source is called, what is read, what ends."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from cleave_worker.transfer.handoff import RefusalReason, RefusedError

pytest.importorskip("torch", reason="torch comes with the engine")

from cleave_worker.transfer.prefix_client import LeasedPrefix
from cleave_worker.transfer.protocol import PrefixLease
from cleave_worker.transfer.sharding import ParallelShape

pytestmark = [
    pytest.mark.vllm,
    # vLLM and what it imports warn of their own future.
    pytest.mark.filterwarnings("ignore"),
]
BLOCK_SIZE = 4
PROMPT = list(range(21))
KEYS = [b"%d" % number for number in range(5)]
PLACE = {"engine_id": "boot-s", "host": "10.0.0.1", "port": 5602}


class Connection:
    """That of a lease."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Source:
    """Answers in place of `request_prefix`."""

    def __init__(self) -> None:
        self.num_cached = 0
        self.refusal: Exception | None = None
        self.requested: list[list[bytes]] = []
        self.connections: list[Connection] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def request(self, source: Any, keys: Any) -> LeasedPrefix:
        self.requested.append(list(keys))
        assert self.go_on.wait(30)
        if self.refusal:
            raise self.refusal
        self.connections.append(Connection())
        blocks = tuple(range(50, 50 + min(self.num_cached, len(keys))))
        lease = PrefixLease(3, blocks, b"mac", ParallelShape(), (("10.0.0.1", 5601),))
        connection: Any = self.connections[-1]
        return LeasedPrefix(source, lease, connection)


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def pulls(source: Source, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("vllm.v1.request", reason="needs the group worker-cpu")
    from cleave_worker.vllm.kv import prefix_pulls

    monkeypatch.setattr(prefix_pulls, "request_prefix", source.request)
    made = prefix_pulls.PrefixPulls("boot-r", BLOCK_SIZE)
    yield made
    source.go_on.set()
    made.close()
    assert all(each.is_closed for each in source.connections)


def request_of(place: object = PLACE, **changed: object) -> Any:
    fields = {
        "request_id": "r",
        "kv_transfer_params": {"do_remote_decode": True, "prefix_source": place},
        "prompt_token_ids": PROMPT,
        "num_prompt_tokens": len(PROMPT),
        "block_hashes": KEYS,
        "skip_reading_prefix_cache": False,
    }
    return SimpleNamespace(**(fields | changed))


def blocks(count: int) -> list[Any]:
    return [SimpleNamespace(block_id=100 + number) for number in range(count)]


def settle(pulls: Any) -> None:
    """Wait until all sources have answered."""
    for lookup in list(pulls._lookups.values()):
        lookup.lease.exception(30)


def count(pulls: Any, request: Any, num_computed: int = 0) -> int | None:
    """What vLLM is answered in the end."""
    if (first := pulls.count_tokens(request, num_computed)) is not None:
        return int(first)
    settle(pulls)
    answer: int | None = pulls.count_tokens(request, num_computed)
    return answer


def test_what_the_own_cache_lacks_is_leased_and_read_once(pulls: Any, source: Source) -> None:
    source.num_cached, source.go_on = 3, threading.Event()
    request = request_of()
    pulls.on_new_request(request)
    assert pulls.count_tokens(request, 4) is None
    assert pulls.count_tokens(request, 4) is None
    source.go_on.set()
    settle(pulls)
    assert pulls.count_tokens(request, 4) == 12
    # vLLM had no room, and its cache has one block more by now.
    assert pulls.count_tokens(request, 8) == 8
    pulls.update_after_alloc(request, blocks(6), 8)
    (read,) = pulls.take_reads().values()
    assert (read.num_skipped, read.blocks) == (1, (102, 103))
    assert read.build_handoff().addresses == (("10.0.0.1", 5601),)
    assert pulls.take_reads() == {}
    assert source.requested == [KEYS[1:5]]
    assert not source.connections[0].is_closed
    pulls.end("r")
    assert source.connections[0].is_closed
    # After a failed pull the prompt is computed here.
    assert pulls.count_tokens(request, 0) == 0
    pulls.update_after_alloc(request, blocks(6), 0)
    assert pulls.take_reads() == {}


def test_the_last_token_is_always_computed(pulls: Any, source: Source) -> None:
    source.num_cached = 9
    request = request_of(num_prompt_tokens=20)
    pulls.on_new_request(request)
    assert count(pulls, request) == 16
    assert source.requested == [KEYS[:4]]


@pytest.mark.parametrize(
    "request_",
    [
        request_of(None),
        request_of({**PLACE, "engine_id": "boot-r"}),
        request_of(prompt_token_ids=None),
        request_of(skip_reading_prefix_cache=True),
        request_of(kv_transfer_params=None),
        request_of({"host": 3}),
        request_of(num_prompt_tokens=4),
    ],
)
def test_other_requests_call_no_source(request_: Any, pulls: Any, source: Source) -> None:
    pulls.on_new_request(request_)
    assert pulls.count_tokens(request_, 0) == 0
    assert source.requested == []


def test_a_cached_prompt_calls_no_source(pulls: Any, source: Source) -> None:
    request = request_of()
    pulls.on_new_request(request)
    assert pulls.count_tokens(request, 20) == 0
    assert source.requested == []


def test_without_a_block_or_with_a_refusal_the_prompt_is_computed(
    pulls: Any, source: Source
) -> None:
    boot = RefusedError(RefusalReason.BOOT, "another boot")
    for number, refusal in enumerate([None, boot, KeyError("unforeseen")]):
        source.refusal = refusal
        request = request_of(request_id=str(number))
        pulls.on_new_request(request)
        assert count(pulls, request) == 0
        pulls.update_after_alloc(request, blocks(6), 0)
    assert pulls.take_reads() == {}
    outcomes = {"missing": 1, RefusalReason.BOOT: 1, RefusalReason.PEER_LOST: 1}
    assert pulls.take_stats().data["prefixes"] == outcomes
    assert not pulls._lookups


def test_a_source_that_cannot_be_reached_is_left_alone_for_a_while(
    pulls: Any, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.refusal = RefusedError(RefusalReason.PEER_LOST, "no route")

    def ask(name: str, **place: object) -> int | None:
        request = request_of(PLACE | place, request_id=name)
        pulls.on_new_request(request)
        return count(pulls, request)

    assert [ask("a"), ask("b")] == [0, 0]
    assert len(source.requested) == 1
    assert ask("c", engine_id="boot-s2") == 0
    assert len(source.requested) == 2
    pulls._avoided_until = dict.fromkeys(pulls._avoided_until, 0.0)
    source.refusal, source.num_cached = None, 1
    assert ask("d") == 4


def test_a_block_that_was_evicted_meanwhile_makes_the_lease_useless(
    pulls: Any, source: Source
) -> None:
    source.num_cached, request = 2, request_of()
    pulls.on_new_request(request)
    assert count(pulls, request, 8) == 8
    assert pulls.count_tokens(request, 4) == 0
    assert source.connections[0].is_closed
    assert pulls.count_tokens(request, 0) == 0


def test_a_request_that_ends_while_it_waits_ends_its_lease(pulls: Any, source: Source) -> None:
    source.go_on, request = threading.Event(), request_of()
    pulls.on_new_request(request)
    assert pulls.count_tokens(request, 0) is None
    pulls.end("r")
    lookup_pool: ThreadPoolExecutor = pulls._pool
    source.go_on.set()
    lookup_pool.shutdown(wait=True)
    assert [each.is_closed for each in source.connections] == [True]


def test_prompts_with_the_same_beginning_pull_it_once(
    pulls: Any, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cleave_worker.vllm.kv import prefix_pulls

    source.num_cached = 3
    first, second, third = (request_of(request_id=name) for name in "abc")
    for each in (first, second, third):
        pulls.on_new_request(each)
    assert count(pulls, first) == 12
    assert pulls.count_tokens(second, 0) is None
    pulls.end("a")
    # The prefix is in the own cache by then.
    source.num_cached = 0
    assert count(pulls, second, 12) == 0
    assert source.requested == [KEYS, KEYS[3:]]
    source.num_cached = 3
    assert count(pulls, third) == 12
    fourth = request_of(request_id="d")
    pulls.on_new_request(fourth)
    assert pulls.count_tokens(fourth, 0) is None
    monkeypatch.setattr(prefix_pulls, "_LOOKUP_TIMEOUT_S", 0.0)
    assert pulls.count_tokens(fourth, 0) == 0
    assert len(source.requested) == 3


def test_few_prompts_have_leases_at_a_time(
    pulls: Any, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cleave_worker.vllm.kv import prefix_pulls

    monkeypatch.setattr(prefix_pulls, "_MAX_LOOKUPS", 2)
    source.num_cached = 1
    keys = [[b"%d-%d" % (number, at) for at in range(5)] for number in range(3)]
    requests = [
        request_of(request_id=str(number), block_hashes=each) for number, each in enumerate(keys)
    ]
    for each in requests:
        pulls.on_new_request(each)
    assert [count(pulls, each) for each in requests] == [4, 4, None]
    pulls.end("0")
    assert count(pulls, requests[2]) == 4


def test_a_lease_that_takes_too_long_or_is_too_old_is_given_up(
    pulls: Any, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cleave_worker.vllm.kv import prefix_pulls

    source.num_cached, source.go_on = 2, threading.Event()
    slow = request_of(request_id="slow")
    pulls.on_new_request(slow)
    assert pulls.count_tokens(slow, 0) is None
    monkeypatch.setattr(prefix_pulls, "_LOOKUP_TIMEOUT_S", 0.0)
    assert pulls.count_tokens(slow, 0) == 0
    source.go_on.set()
    monkeypatch.setattr(prefix_pulls, "_LOOKUP_TIMEOUT_S", 30.0)
    old = request_of(request_id="old")
    pulls.on_new_request(old)
    assert count(pulls, old) == 8
    monkeypatch.setattr(prefix_pulls, "_MAX_LEASE_AGE_S", 0.0)
    assert pulls.count_tokens(old, 0) == 0
    assert pulls.take_stats().data["prefixes"] == {RefusalReason.TIME_OUT: 2}
