"""KV followed by and from several ranks: each takes its part, and one lost rank makes all void."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

torch = pytest.importorskip("torch", reason="torch comes with the engine")

from cleave_worker.transfer import rank_resolver, server  # noqa: E402
from cleave_worker.transfer.handoff import Handoff, RefusalReason  # noqa: E402
from cleave_worker.transfer.progress import Progress  # noqa: E402
from cleave_worker.transfer.sharding import ParallelShape  # noqa: E402
from cleave_worker.transfer.transport import Transport  # noqa: E402

from tests.support.slow_prefill import BOUND_S, WHOLE, Decode, Prefill, PrefillRank, reason  # noqa: E402

TP_2, PP_2 = ParallelShape(2), ParallelShape(1, (0, 2))
SHAPES = {
    "TP 2": (TP_2, TP_2),
    "PP 2": (PP_2, PP_2),
    "TP 2 and PP 2": (ParallelShape(2, (0, 2)), ParallelShape(2, (0, 2))),
    "more ranks than heads": (ParallelShape(4), ParallelShape(4)),
    "TP 2 to 1": (TP_2, ParallelShape()),
    "TP 1 to 2": (ParallelShape(), TP_2),
    "copies that nobody needs": (ParallelShape(4), TP_2),
    "fewer copies": (TP_2, ParallelShape(4)),
    "PP 2 to 2, cut elsewhere": (PP_2, ParallelShape(1, (0, 1))),
    "PP 2 to TP 2": (PP_2, TP_2),
    "TP 2 to PP 2": (TP_2, PP_2),
}
ALIKE, TO_ONE = (TP_2, TP_2), (TP_2, ParallelShape())
Steps = Callable[[PrefillRank], list[Progress]]
STEPS: dict[str, Steps] = {
    "at once": lambda _: [WHOLE],
    "by chunks": lambda _: [Progress(1, 1, 0), Progress(3, 3, 0), WHOLE],
    "by layers": PrefillRank.steps_by_layer,
}
Make = Callable[..., tuple[Prefill, Decode]]


@pytest.fixture
def make() -> Iterator[Make]:
    ranks: list[Prefill | Decode] = []

    def both(
        shapes: tuple[ParallelShape, ParallelShape], way: Transport = Transport.SHARED_MEMORY
    ) -> tuple[Prefill, Decode]:
        prefill, decode = Prefill(shapes[0]), Decode(way, shape=shapes[1])
        ranks.extend((prefill, decode))
        return prefill, decode

    yield both
    for one in ranks:
        one.close()


def ahead(prefill: Prefill) -> Handoff:
    """As a gateway makes it: it knows the first rank."""
    return prefill.ranks[0].handoff()


def freed_in_the_end(prefill: Prefill, ranks: list[int]) -> bool:
    """Whether each of these ranks reports this to its engine."""
    left, deadline = set(ranks), time.monotonic() + BOUND_S
    while left and time.monotonic() < deadline:
        left -= {rank for rank, freed in enumerate(prefill.freed()) if freed}
        time.sleep(0.01)
    return not left


def compute_and_be_heard(prefill: Prefill, decode: Decode, steps: Steps) -> None:
    """Each step when all that follow the rank have taken the one before."""
    for rank, num_followers in zip(prefill.ranks, prefill.num_followers(decode.shape), strict=True):
        for step in steps(rank):
            for _ in range(num_followers):
                assert rank.pull_requested.acquire(timeout=BOUND_S), "what came is taken at once"
            rank.compute(step)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", SHAPES)
def test_every_rank_takes_its_part_while_it_is_computed(make: Make, name: str, steps: str) -> None:
    prefill, decode = make(SHAPES[name])
    following = decode.follow_all(ahead(prefill))
    prefill.begin()
    compute_and_be_heard(prefill, decode, STEPS[steps])
    assert [one.result(BOUND_S) for one in following] == [Transport.SHARED_MEMORY] * len(following)
    assert not any(prefill.freed()), "the engine itself still works on it"
    prefill.end()
    assert freed_in_the_end(prefill, list(range(len(prefill.ranks))))
    assert all(map(decode.has_what_was_computed, range(len(decode.readers))))


@pytest.mark.parametrize("name", ["TP 2", "TP 1 to 2", "TP 2 to PP 2"])
def test_links_that_need_both_ends_bring_the_same(make: Make, name: str) -> None:
    prefill, decode = make(SHAPES[name], Transport.GLOO)
    following = decode.follow_all(ahead(prefill))
    prefill.begin()
    compute_and_be_heard(prefill, decode, STEPS["by layers"])
    assert [one.result(BOUND_S) for one in following] == [Transport.GLOO] * len(following)
    assert all(map(decode.has_what_was_computed, range(len(decode.readers))))


def test_an_owner_keeps_its_blocks_until_every_rank_has_had_its_last_word(make: Make) -> None:
    prefill, decode = make((ParallelShape(), TP_2))
    prefill.begin()
    first = decode.follow(ahead(prefill), rank=1)
    prefill.ranks[0].compute(WHOLE)
    assert first.result(BOUND_S)
    prefill.end()
    assert prefill.freed() == [False]
    assert reason(decode.follow(ahead(prefill), rank=1)) is RefusalReason.BUSY
    assert decode.follow(ahead(prefill), rank=0).result(BOUND_S)
    assert prefill.freed() == [True]
    assert all(map(decode.has_what_was_computed, (0, 1)))


def test_ranks_of_two_engines_never_follow_one_prefill(make: Make) -> None:
    prefill, decode = make((ParallelShape(), TP_2))
    other = Decode(Transport.SHARED_MEMORY, shape=TP_2, boot_id="boot-e")
    prefill.begin()
    following = decode.follow(ahead(prefill), rank=0)
    assert prefill.ranks[0].pull_requested.acquire(timeout=BOUND_S)
    prefill.ranks[0].compute(Progress(1, 1, 0))
    assert prefill.ranks[0].pull_requested.acquire(timeout=BOUND_S)
    assert reason(other.follow(ahead(prefill), rank=1)) is RefusalReason.BUSY
    other.close()
    prefill.ranks[0].compute(WHOLE)
    assert following.result(BOUND_S)


def dies(prefill: Prefill) -> None:
    prefill.ranks[1].owner.close()


def is_given_up(prefill: Prefill) -> None:
    prefill.ranks[1].holds.cancel("theirs")


def begins_anew_under_the_same_name(prefill: Prefill) -> None:
    rank = prefill.ranks[1]
    with rank.holds._changed:
        rank.holds.cancel("theirs")
        rank.begin(epoch=2)
        rank.compute(WHOLE)


def says_what_no_prefill_says(prefill: Prefill) -> None:
    prefill.ranks[1].compute(Progress(0, 0, 0))


FAULTS = {
    dies: RefusalReason.PEER_LOST,
    is_given_up: RefusalReason.NOT_HELD,
    begins_anew_under_the_same_name: RefusalReason.BUSY,
    says_what_no_prefill_says: RefusalReason.MALFORMED,
}


def begun_and_heard(
    make: Make, shapes: tuple[ParallelShape, ParallelShape]
) -> tuple[Prefill, Decode, list[Future[Transport]]]:
    """A prefill of two ranks of which one block has come at each."""
    prefill, decode = make(shapes)
    following = decode.follow_all(ahead(prefill))
    prefill.begin()
    for rank in prefill.ranks:
        assert rank.pull_requested.acquire(timeout=BOUND_S)
        rank.compute(Progress(1, 1, 0))
        assert rank.pull_requested.acquire(timeout=BOUND_S)
    return prefill, decode, following


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_rank_that_is_lost_voids_its_part_and_the_rest_is_free(
    make: Make, fault: Callable[[Prefill], None]
) -> None:
    prefill, _, (first, second) = begun_and_heard(make, ALIKE)
    fault(prefill)
    assert reason(second) is FAULTS[fault]
    prefill.ranks[0].compute(WHOLE)
    assert first.result(BOUND_S), "it is told apart from the other by vLLM, which needs both"
    prefill.end(prefill.ranks[:1])
    assert freed_in_the_end(prefill, [0])


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_who_follows_two_ranks_attends_to_nothing_when_one_is_lost(
    make: Make, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Prefill], None]
) -> None:
    prefill, _, (following,) = begun_and_heard(make, TO_ONE)
    # Whoever waits at the other rank looks soon whether it is over.
    monkeypatch.setattr(server, "_PREFILL_WAIT_S", 0.05)
    prefill.ranks[0].compute(Progress(2, 2, 0))
    fault(prefill)
    assert reason(following) is FAULTS[fault]
    prefill.end(prefill.ranks[:1])
    assert freed_in_the_end(prefill, [0])


def test_ranks_that_speak_of_different_prefills_are_refused(make: Make) -> None:
    prefill, decode = make(TO_ONE)
    following = decode.follow(ahead(prefill))
    for epoch, rank in enumerate(prefill.ranks, start=1):
        rank.begin(epoch)
        rank.compute(WHOLE)
    assert reason(following) is RefusalReason.EPOCH
    for epoch, rank in enumerate(prefill.ranks, start=1):
        rank.end(epoch)
    assert freed_in_the_end(prefill, [0, 1])


@pytest.mark.parametrize("shapes", [ALIKE, TO_ONE])
def test_a_rank_that_is_late_is_waited_for_within_bounds_and_freed(
    make: Make, monkeypatch: pytest.MonkeyPatch, shapes: tuple[ParallelShape, ParallelShape]
) -> None:
    monkeypatch.setattr(server, "_PREFILL_WAIT_S", 0.05)
    prefill, decode = make(shapes)
    for one in decode.followers:
        one._timeout_s = 0.2
    prefill.begin()
    prefill.ranks[0].compute(WHOLE)
    following = decode.follow_all(ahead(prefill))
    assert reason(following[-1]) is RefusalReason.TIME_OUT
    prefill.end()
    assert freed_in_the_end(prefill, [0, 1])


def test_what_is_declined_before_it_comes_is_freed_at_every_rank(make: Make) -> None:
    for shapes in (ALIKE, (ParallelShape(4), TP_2), (ParallelShape(), TP_2)):
        prefill, decode = make(shapes)
        for each in decode.readers:
            each.decline(ahead(prefill))
        prefill.begin()
        for rank in prefill.ranks:
            rank.compute(WHOLE)
        prefill.end()
        assert all(prefill.freed())


def test_the_ranks_of_an_owner_are_requested_once(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = make(ALIKE)
    calls = []
    ask = rank_resolver._request_ranks
    monkeypatch.setattr(
        rank_resolver, "_request_ranks", lambda *args: calls.append(args) or ask(*args)
    )
    reader = decode.readers[1]
    for _ in range(2):
        (peer,) = reader.resolve_ranks(ahead(prefill))
        assert peer.address == ("127.0.0.1", prefill.ranks[1].owner.port)
    assert len(calls) == 1


def test_an_engine_that_does_not_know_its_ranks_yet_is_waited_for(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_PREFILL_WAIT_S", 0.05)
    rank, (_, decode) = PrefillRank(TP_2, 0), make(ALIKE)
    assert reason(decode.follow(rank.handoff())) is RefusalReason.NOT_HELD
    monkeypatch.setattr(server, "_PREFILL_WAIT_S", BOUND_S)
    found = decode.pool.submit(decode.readers[0].resolve_ranks, rank.handoff())
    rank.owner.set_rank_addresses((("127.0.0.1", rank.owner.port), ("127.0.0.1", 1)))
    (peer,) = found.result(BOUND_S)
    assert peer.shape == TP_2
    rank.owner.close()
