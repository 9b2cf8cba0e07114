"""The workers' half of the KV connector: two of them in this process, with real memory."""

import queue
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch comes with the engine")

from cleave_worker.transfer.block_leases import BlockLeases, FinishedPrefill, PrefillInProgress  # noqa: E402
from cleave_worker.transfer.client import KvClient  # noqa: E402
from cleave_worker.transfer.handoff import Handoff, RefusalReason, RefusedError  # noqa: E402
from cleave_worker.transfer.prefix_client import PrefixRead, SourceAddress  # noqa: E402
from cleave_worker.transfer.protocol import PrefixLease  # noqa: E402
from cleave_worker.transfer.sharding import ParallelShape  # noqa: E402
from cleave_worker.transfer.transport import Transport  # noqa: E402

from tests.support.kv_server_process import caches, register_kv  # noqa: E402

pytestmark = [
    pytest.mark.vllm,
    # vLLM and what it imports warn of their own future.
    pytest.mark.filterwarnings("ignore"),
]
BOUND_S = 60.0
ONE_RANK = ParallelShape()


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    pytest.importorskip("vllm", reason="needs the group worker-cpu")
    from cleave_worker.vllm.kv.worker_side import ConnectorSettings, WorkerSide

    started: list[WorkerSide] = []

    def one(boot_id: str, tensors: list[Any], lease_s: float = BOUND_S, **place: Any) -> WorkerSide:
        ways = (Transport.SHARED_MEMORY, Transport.GLOO)
        settings = ConnectorSettings(0, ways, lease_s, BOUND_S, check_bytes=True)
        started.append(WorkerSide(register_kv(boot_id, tensors, **place), settings))
        return started[-1]

    yield one
    for each in started:
        each.close()


def orders(**options: Any) -> Any:
    from cleave_worker.vllm.kv.metadata import CleaveConnectorMetadata

    return CleaveConnectorMetadata(**options)


def build_pull(port: int, boot_id: str = "boot-p") -> Any:
    from cleave_worker.vllm.kv.metadata import PullTask

    handoff = Handoff(boot_id, "theirs", 1, "d", 32, (("127.0.0.1", port),))
    return PullTask(handoff, "d", 0, (5, 6))


def received(side: Any) -> tuple[set[str], set[str]]:
    deadline = time.monotonic() + BOUND_S
    while not (ended := side.take_received())[0]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return ended


def test_a_pull_is_reported_once_and_frees_what_was_held(start: Callable[..., Any]) -> None:
    theirs, ours = caches(1000), caches(0)
    prefill, decode = start("boot-p", theirs), start("boot-d", ours)
    prefill.apply_metadata(orders(finished_prefills={"theirs": FinishedPrefill(1, "d", (2, 9))}))
    decode.start_pulls({"mine": build_pull(prefill.port)}, {})
    assert received(decode) == ({"mine"}, set())
    assert decode.take_received() == (set(), set())
    assert prefill.take_sent() == {"theirs"}
    assert prefill.take_sent() == set()
    for own, other in zip(ours, theirs, strict=True):
        assert torch.equal(own[5], other[2])
        assert torch.equal(own[6], other[9])
    (way,) = decode.take_stats().data["bytes"]
    assert way == Transport.SHARED_MEMORY


def test_a_refused_pull_is_reported_as_failed_with_its_reason(start: Callable[..., Any]) -> None:
    prefill, decode = start("boot-p", caches(1000)), start("boot-d", caches(0))
    decode.start_pulls({"mine": build_pull(prefill.port, boot_id="before")}, {})
    assert received(decode) == ({"mine"}, {"mine"})
    assert decode.take_stats().data["ended"] == {RefusalReason.BOOT: 1}


def test_memory_of_a_producer_that_is_gone_is_released_without_another_pull(
    start: Callable[..., Any],
) -> None:
    prefill, decode = start("boot-p", caches(1000)), start("boot-d", caches(0), lease_s=0.3)
    prefill.apply_metadata(orders(finished_prefills={"theirs": FinishedPrefill(1, "d", (2, 9))}))
    decode.start_pulls({"mine": build_pull(prefill.port)}, {})
    assert received(decode) == ({"mine"}, set())
    (connection,) = decode._client._connections.values()
    assert connection._one_sided._maps
    for accepted in list(prefill._server._listener._connections):
        accepted.close()
    deadline = time.monotonic() + BOUND_S
    while connection._one_sided._maps:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_prefixes_are_read_and_counted_apart_from_handoffs(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = PrefixRead(
        SourceAddress("boot-s", "127.0.0.1", 1), PrefixLease(1, (3,), b"", ONE_RANK, ()), 0, (5,)
    )
    refusals = [None, RefusedError(RefusalReason.LAPSED, "too late"), KeyError("unforeseen")]

    def pull(client: KvClient, given: PrefixRead) -> Transport:
        assert given is read
        if refusal := refusals.pop(0):
            raise refusal
        return Transport.GLOO

    monkeypatch.setattr(KvClient, "pull_prefix", pull)
    reader = start("boot-r", caches(0))
    reader.apply_metadata(orders(addresses=(("127.0.0.1", 1),), prefix_secret="secret"))
    assert reader._server.prefix_secret == "secret"
    for failed in (set(), {"mine"}, {"mine"}):
        reader.start_prefix_reads({"mine": read})
        assert received(reader) == ({"mine"}, failed)
    stats = reader.take_stats().data
    assert stats["prefixes"] == {"pulled": 1, RefusalReason.LAPSED: 1, RefusalReason.PEER_LOST: 1}
    assert stats["ended"] == {}
    assert list(stats["bytes"]) == [Transport.GLOO]


def test_after_any_failure_the_end_of_the_request_is_reported(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> Transport:
        raise KeyError("unforeseen")

    monkeypatch.setattr(KvClient, "pull", broken)
    decode = start("boot-d", caches(0))
    decode.start_pulls({"mine": build_pull(1)}, {})
    assert received(decode) == ({"mine"}, {"mine"})


def test_what_is_declined_or_expires_is_freed(start: Callable[..., Any]) -> None:
    prefill, decode = start("boot-p", caches(1000)), start("boot-d", caches(0))
    prefill.apply_metadata(orders(finished_prefills={"theirs": FinishedPrefill(1, "d", (2, 9))}))
    decode.start_pulls({}, {"mine": build_pull(prefill.port).handoff})
    deadline = time.monotonic() + BOUND_S
    while not (freed := prefill.take_sent()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert freed == {"theirs"}
    assert prefill.take_stats().is_empty()


def test_what_waits_for_its_turn_sends_heartbeats_until_it_was_pulled(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    beats: queue.SimpleQueue[tuple[str, ...]] = queue.SimpleQueue()
    monkeypatch.setattr(BlockLeases, "extend", lambda self, ids: beats.put(tuple(ids)))
    prefill, decode = start("boot-p", caches(1000)), start("boot-d", caches(0), lease_s=0.3)
    prefill.apply_metadata(orders(finished_prefills={"theirs": FinishedPrefill(1, "d", (2, 9))}))
    decode.apply_metadata(orders(expected_pulls={"mine": build_pull(prefill.port).handoff}))
    assert beats.get(timeout=BOUND_S) == ("theirs",)
    decode.start_pulls({"mine": build_pull(prefill.port)}, {})
    assert received(decode) == ({"mine"}, set())
    assert not decode._expected_handoffs


def test_a_prefill_is_followed_from_its_first_step_to_its_hold(start: Callable[..., Any]) -> None:
    from cleave_worker.vllm.kv.metadata import ComputedChunk, PullTask

    theirs, ours = caches(1000), caches(0)
    prefill, decode = start("boot-p", theirs), start("boot-d", ours)
    ahead = Handoff("boot-p", "name", 0, "", 0, (("127.0.0.1", prefill.port),))
    decode.start_pulls({"mine": PullTask(ahead, "d", 0, (5, 6))}, {})
    prefill.apply_metadata(
        orders(started_prefills={"theirs": PrefillInProgress(1, "d", 2, "name")})
    )
    for number, chunk in enumerate(
        (ComputedChunk((2,), 0, 1, False), ComputedChunk((2, 9), 1, 2, True))
    ):
        prefill.apply_metadata(orders(computed_chunks={"theirs": chunk}))
        for plane in range(len(theirs)):
            prefill.layer_notifier.finish_layer(plane)
        assert number == 0 or prefill.take_sent() == set()
        prefill.layer_notifier.finish_step()
    prefill.apply_metadata(orders(finished_prefills={"theirs": FinishedPrefill(1, "d", (2, 9))}))
    assert received(decode) == ({"mine"}, set())
    assert prefill.take_sent() == {"theirs"}
    for own, other in zip(ours, theirs, strict=True):
        assert torch.equal(own[5], other[2])
        assert torch.equal(own[6], other[9])


def test_a_prefill_that_is_given_up_fails_its_follower(start: Callable[..., Any]) -> None:
    from cleave_worker.vllm.kv.metadata import PullTask

    prefill, decode = start("boot-p", caches(1000)), start("boot-d", caches(0))
    ahead = Handoff("boot-p", "name", 0, "", 0, (("127.0.0.1", prefill.port),))
    prefill.apply_metadata(
        orders(started_prefills={"theirs": PrefillInProgress(1, "d", 2, "name")})
    )
    decode.start_pulls({"mine": PullTask(ahead, "d", 0, (5, 6))}, {})
    prefill.apply_metadata(orders(cancelled_prefills={"theirs"}))
    assert received(decode) == ({"mine"}, {"mine"})
    assert prefill.take_sent() == set()


TP_2 = ParallelShape(2)


@pytest.fixture
def pair_of_ranks(start: Callable[..., Any]) -> tuple[list[Any], list[Any], Any]:
    """Two engines of two ranks each, and the decode engine's request that follows a prefill."""
    from cleave_worker.vllm.kv.metadata import PullTask

    prefill, decode = (
        [
            start(boot, caches(fill, TP_2, rank), shape=TP_2, rank=rank)
            for rank in range(TP_2.num_ranks)
        ]
        for boot, fill in (("boot-p", 1000), ("boot-d", 0))
    )
    addresses = tuple(("127.0.0.1", rank.port) for rank in prefill)
    begun = PrefillInProgress(1, "d", 2, "name")
    for rank in prefill:
        rank.apply_metadata(orders(started_prefills={"theirs": begun}, addresses=addresses))
    ahead = Handoff("boot-p", "name", 0, "", 0, addresses[:1])
    return prefill, decode, PullTask(ahead, "d", 0, (5, 6))


def compute(rank: Any) -> None:
    """The whole prompt, and the engine's word that it is held."""
    from cleave_worker.vllm.kv.metadata import ComputedChunk

    rank.apply_metadata(orders(computed_chunks={"theirs": ComputedChunk((2, 9), 0, 2, True)}))
    rank.layer_notifier.finish_step()
    rank.apply_metadata(orders(finished_prefills={"theirs": FinishedPrefill(1, "d", (2, 9))}))


def report_to_scheduler(ranks: list[Any]) -> Any:
    """What vLLM makes of the words of all ranks, step by step until a request is over or sent."""
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    aggregator, deadline = KVOutputAggregator(len(ranks)), time.monotonic() + BOUND_S
    while time.monotonic() < deadline:
        outputs = []
        for rank in ranks:
            over, failed = rank.take_received()
            said = KVConnectorOutput(rank.take_sent(), over, failed_recving=failed)
            outputs.append(ModelRunnerOutput([], {}, kv_connector_output=said))
        output = aggregator.aggregate(outputs).kv_connector_output
        if output.finished_recving or output.finished_sending:
            return output
        time.sleep(0.01)
    raise AssertionError("nothing has ended")


def test_a_prompt_that_two_ranks_follow_is_ready_when_both_have_it(
    pair_of_ranks: tuple[list[Any], list[Any], Any],
) -> None:
    prefill, decode, metadata = pair_of_ranks
    for rank in decode:
        rank.start_pulls({"mine": metadata}, {})
    compute(prefill[0])
    deadline = time.monotonic() + BOUND_S
    while decode[0]._finished_pulls.empty():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert decode[1]._finished_pulls.empty()
    compute(prefill[1])
    output = report_to_scheduler(decode)
    assert (output.finished_recving, output.failed_recving) == ({"mine"}, set())
    assert report_to_scheduler(prefill).finished_sending == {"theirs"}


def test_a_prompt_of_which_one_rank_is_lost_has_failed_when_the_other_has_ended(
    pair_of_ranks: tuple[list[Any], list[Any], Any],
) -> None:
    prefill, decode, metadata = pair_of_ranks
    for rank in decode:
        rank.start_pulls({"mine": metadata}, {})
    prefill[1].apply_metadata(orders(cancelled_prefills={"theirs"}))
    compute(prefill[0])
    output = report_to_scheduler(decode)
    assert (output.finished_recving, output.failed_recving) == ({"mine"}, {"mine"})
    assert prefill[0].take_sent() == {"theirs"}
    assert prefill[1].take_sent() == set()
