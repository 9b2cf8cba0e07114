"""KV that comes while it is computed: whole and in order, or refused, and freed on both sides."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch", reason="torch comes with the engine")

from cleave_worker.transfer import layerwise_client, server  # noqa: E402
from cleave_worker.transfer.block_leases import (  # noqa: E402
    BlockLeases,
    ConsumerRank,
    FinishedPrefill,
    PrefillInProgress,
)
from cleave_worker.transfer.handoff import Handoff, RefusalReason  # noqa: E402
from cleave_worker.transfer.progress import NO_PROGRESS, Progress  # noqa: E402
from cleave_worker.transfer.transport import Transport  # noqa: E402

from tests.support.kv_server_process import LAYERS, OwnerProcess, caches  # noqa: E402
from tests.support.slow_prefill import (  # noqa: E402
    BOUND_S,
    DIGEST,
    HERE,
    OWNER_BLOCKS,
    WHOLE,
    Decode,
    PrefillRank,
    reason,
)


@pytest.fixture
def prefill() -> Iterator[PrefillRank]:
    prefill_rank = PrefillRank()
    yield prefill_rank
    prefill_rank.owner.close()


@pytest.fixture(params=[Transport.SHARED_MEMORY, Transport.CUDA_IPC, Transport.GLOO])
def decode(request: pytest.FixtureRequest) -> Iterator[Decode]:
    decode_rank = Decode(Transport(request.param))
    yield decode_rank
    decode_rank.close()


LAYER_BY_LAYER = [Progress(0, 2, planes) for planes in range(1, LAYERS + 1)] + [
    Progress(2, 4, planes) for planes in range(1, LAYERS + 1)
]
WAYS_TO_COME = {
    "at once": [WHOLE],
    "by chunks": [Progress(1, 1, 0), Progress(3, 3, 0), WHOLE],
    "by layers": [*LAYER_BY_LAYER, WHOLE],
}


@pytest.mark.parametrize("steps", WAYS_TO_COME.values(), ids=list(WAYS_TO_COME))
def test_kv_arrives_as_it_is_computed_and_is_freed_with_the_prefills_end(
    prefill: PrefillRank, decode: Decode, steps: list[Progress]
) -> None:
    following = decode.follow(prefill.handoff())
    assert prefill.pull_requested.acquire(timeout=BOUND_S), "it waits before the prefill has come"
    prefill.begin()
    for step in steps:
        prefill.compute(step)
        if step is not WHOLE:
            assert prefill.pull_requested.acquire(timeout=BOUND_S), "what came is taken at once"
    assert following.result(BOUND_S)
    assert prefill.holds.take_freed() == set(), "the engine itself still works on it"
    prefill.end()
    assert prefill.holds.take_freed() == {"theirs"}
    assert decode.has_what_was_computed()


def test_what_a_prefix_cache_has_is_not_moved(prefill: PrefillRank, decode: Decode) -> None:
    prefill.begin()
    following = decode.follow(prefill.handoff(), (7,), first=3)
    prefill.compute(*LAYER_BY_LAYER, WHOLE)
    assert following.result(BOUND_S)
    for layer, computed in zip(decode.tensors[0], caches(1000), strict=True):
        assert torch.equal(layer[7], computed[OWNER_BLOCKS[3]])


def test_a_prefill_that_ended_before_anybody_came_is_read_from_its_hold(
    prefill: PrefillRank, decode: Decode
) -> None:
    prefill.begin()
    prefill.compute(WHOLE)
    prefill.end()
    assert decode.follow(prefill.handoff()).result(BOUND_S)
    assert prefill.holds.take_freed() == {"theirs"}


def test_waiting_for_one_prompt_keeps_no_other_of_the_same_owner_waiting(
    prefill: PrefillRank, decode: Decode
) -> None:
    prefill.begin()
    following = decode.follow(prefill.handoff())
    assert prefill.pull_requested.acquire(timeout=BOUND_S)
    prefill.tensors[0][12] = 77
    prefill.holds.grant("other", FinishedPrefill(2, "o", (12,)))
    other = prefill.handoff(request_id="other", epoch=2, prompt_digest="o")
    assert decode.readers[0].pull(other, "o", 0, (13,))
    assert decode.tensors[0][0][13, 0, 0, 0] == 77
    prefill.compute(WHOLE)
    assert following.result(BOUND_S)


def test_a_prefill_that_is_given_up_is_refused_whenever_that_comes(
    prefill: PrefillRank, decode: Decode
) -> None:
    prefill.begin()
    following = decode.follow(prefill.handoff())
    assert prefill.pull_requested.acquire(timeout=BOUND_S)
    prefill.compute(Progress(2, 2, 0))
    assert prefill.pull_requested.acquire(timeout=BOUND_S)
    prefill.holds.cancel("theirs")
    assert reason(following) is RefusalReason.NOT_HELD
    # The same request computed again is another hold, which no reader takes for the first.
    assert reason(decode.follow(prefill.handoff())) is RefusalReason.NOT_HELD
    assert prefill.holds.take_freed() == set()


def test_what_is_given_up_between_the_last_byte_and_the_last_word_is_void(
    prefill: PrefillRank, decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = prefill.holds.release

    def late(request_id: str, epoch: int) -> bool:
        prefill.holds.cancel(request_id)
        return release(request_id, epoch)

    monkeypatch.setattr(prefill.holds, "release", late)
    prefill.begin()
    prefill.compute(WHOLE)
    assert reason(decode.follow(prefill.handoff())) is RefusalReason.LAPSED


def test_kv_of_another_prompt_or_boot_is_refused(prefill: PrefillRank, decode: Decode) -> None:
    prefill.begin()
    prefill.compute(WHOLE)
    assert reason(decode.follow(prefill.handoff(boot_id="before"))) is RefusalReason.BOOT
    following = decode.pool.submit(decode.followers[0].pull, prefill.handoff(), "other", 0, HERE)
    assert reason(following) is RefusalReason.PROMPT


def test_a_prefill_that_never_comes_or_never_ends_is_waited_for_within_bounds(
    prefill: PrefillRank, decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_PREFILL_WAIT_S", 0.05)
    assert reason(decode.follow(prefill.handoff())) is RefusalReason.NOT_HELD
    prefill.begin()
    hasty = layerwise_client.LayerwiseClient(decode.readers[0], timeout_s=0.01)
    following = decode.pool.submit(hasty.pull, prefill.handoff(), DIGEST, 0, HERE)
    assert reason(following) is RefusalReason.TIME_OUT


def test_only_one_may_follow_and_when_it_leaves_the_blocks_are_freed_at_the_end(
    prefill: PrefillRank, decode: Decode
) -> None:
    prefill.begin()
    following = decode.follow(prefill.handoff())
    assert prefill.pull_requested.acquire(timeout=BOUND_S)
    prefill.compute(Progress(1, 1, 0))
    assert prefill.pull_requested.acquire(timeout=BOUND_S)
    assert reason(decode.follow(prefill.handoff())) is RefusalReason.BUSY
    prefill.compute(Progress(0, 0, 0))  # What no prefill says.
    assert reason(following) is RefusalReason.MALFORMED
    prefill.end()
    deadline = time.monotonic() + BOUND_S
    while not (freed := prefill.holds.take_freed()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert freed == {"theirs"}


def test_a_name_that_is_declined_before_its_prefill_comes_is_freed_at_its_end(
    prefill: PrefillRank, decode: Decode
) -> None:
    decode.readers[0].decline(prefill.handoff())
    prefill.begin()
    prefill.compute(WHOLE)
    prefill.end()
    assert prefill.holds.take_freed() == {"theirs"}
    assert prefill.holds.num_leased == 0


def test_bytes_that_changed_on_their_way_are_refused(
    prefill: PrefillRank, decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "compute_checksums", lambda *args: (1, 2, 3, 4))
    prefill.begin()
    prefill.compute(WHOLE)
    assert reason(decode.follow(prefill.handoff())) is RefusalReason.CHECKSUM


def test_an_owner_that_dies_is_noticed(decode: Decode) -> None:
    process = OwnerProcess()
    handoff = handoff_of(process)
    process.command("begin", id="theirs", digest=DIGEST, num_blocks=4, name="name")
    following = decode.follow(handoff)
    process.command("die")
    assert reason(following) is RefusalReason.PEER_LOST
    process.end()


def handoff_of(process: OwnerProcess) -> Handoff:
    return Handoff(
        process.boot_id, "name", 0, "", 0, (("127.0.0.1", process.port),), key=process.key
    )


class Recorded:
    """A point that the GPU reaches on command."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    def synchronize(self) -> None:
        assert self.reached.wait(BOUND_S)


def test_nothing_is_announced_before_the_gpu_has_computed_it() -> None:
    holds = BlockLeases(BOUND_S, BOUND_S)
    holds.begin_prefill("theirs", PrefillInProgress(1, DIGEST, 4, "name"))
    computed = Recorded()
    holds.update_progress("theirs", OWNER_BLOCKS, WHOLE, computed)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(
            holds.wait_for_progress,
            ConsumerRank("boot-d", 0, 1),
            "name",
            DIGEST,
            NO_PROGRESS,
            BOUND_S,
            is_repeat=False,
        )
        assert not future.done()
        computed.reached.set()
        assert future.result(BOUND_S).progress == WHOLE
