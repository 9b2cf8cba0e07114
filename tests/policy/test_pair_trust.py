"""What canaries say about a pair, and what they may cost."""

import math
import random

import pytest

from cleave.policy import pair_trust
from cleave.policy.kv_transfer_sample import TransferSample
from cleave.policy.pair_trust import (
    BytesVerdict,
    EngineBudget,
    PairHistory,
    PairStanding,
    PullRate,
    RatedPair,
    TokenChoice,
    TokenVerdict,
    assess_bytes,
    choose_prompt_tokens,
    compare_tokens,
    compute_due_rate,
    find_block_bytes,
    is_slow,
)
from cleave.rpc.pull_counters import PullCounters

PERIOD_S = 20.0


@pytest.mark.parametrize(
    ("decoded", "verdict"),
    [
        (TokenChoice("a", {"a": -0.3, "b": -1.5}), TokenVerdict.SAME),
        (TokenChoice("a", {"a": -0.35, "c": -9.0}), TokenVerdict.SAME),
        (TokenChoice("b", {"b": -0.6, "a": -0.7}), TokenVerdict.NEAR_TIE),
        (TokenChoice("c", {"c": -0.1}), TokenVerdict.DIFFERENT),
        # The same token of other KV: its probability shows it.
        (TokenChoice("a", {"a": -2.0, "b": -1.9}), TokenVerdict.DIFFERENT),
        (TokenChoice("b", {"b": -0.01, "a": -5.0}), TokenVerdict.DIFFERENT),
        (TokenChoice("a", {}), TokenVerdict.SAME),
    ],
)
def test_a_token_is_wrong_only_if_no_near_tie_explains_it(
    decoded: TokenChoice, verdict: TokenVerdict
) -> None:
    reference = TokenChoice("a", {"a": -0.4, "b": -0.8, "unlikely": -12.0})
    assert compare_tokens(reference, decoded) is verdict


def test_improbable_tokens_may_shift() -> None:
    reference = TokenChoice("a", {"a": -0.1, "z": -9.0})
    assert compare_tokens(reference, TokenChoice("a", {"a": -0.1, "z": -11.0})) is TokenVerdict.SAME


def sample(num_bytes: float, others: float = 0.0, failed: float = 0.0) -> TransferSample:
    """A canary of 160 tokens in ten blocks; `others`: tokens of other handoffs beside it."""
    after = PullCounters(num_bytes, 1.0, 160 + others, failed)
    return TransferSample(160, 10, 1.0, 1.0, PullCounters(0, 0, 0, 0), after)


@pytest.mark.parametrize(
    ("measured", "block_bytes", "verdict"),
    [
        (sample(1_000.0), 100.0, BytesVerdict.MOVED),
        (sample(1_000.0), 0.0, BytesVerdict.MOVED),
        (sample(0.0), 0.0, BytesVerdict.MISSING),
        (sample(800.0), 100.0, BytesVerdict.MISSING),
        # The failure may be another handoff's, unless bytes are missing.
        (sample(1_000.0, failed=1), 100.0, BytesVerdict.UNCLEAR),
        (sample(800.0, failed=1), 100.0, BytesVerdict.MISSING),
        (sample(0.0, failed=1), 0.0, BytesVerdict.MISSING),
        (sample(500.0, failed=1), 0.0, BytesVerdict.BLURRED),
        (sample(3_000.0, others=320), 100.0, BytesVerdict.MOVED),
        # Those of the others alone.
        (sample(2_000.0, others=320), 100.0, BytesVerdict.BLURRED),
        (sample(2_000.0, others=320, failed=1), 100.0, BytesVerdict.BLURRED),
        (sample(3_000.0, others=320, failed=1), 100.0, BytesVerdict.UNCLEAR),
    ],
)
def test_bytes_are_due_for_every_block(
    measured: TransferSample, block_bytes: float, verdict: BytesVerdict
) -> None:
    assert assess_bytes(measured, block_bytes) is verdict


@pytest.mark.parametrize(
    ("gb_per_s", "pull_ms", "others", "slow"),
    [
        (2.0, 100.0, [20.0, 19.0], True),
        (6.0, 100.0, [20.0, 19.0], False),
        (2.0, 5.0, [20.0, 19.0], False),
        (2.0, 100.0, [2.0, 2.1], False),
        (2.0, 100.0, [20.0, 2.0, 20.0], True),
        (0.0, 100.0, [20.0], False),
        (2.0, 100.0, [], False),
    ],
)
def test_a_pair_is_slow_beside_others_only(
    gb_per_s: float, pull_ms: float, others: list[float], slow: bool
) -> None:
    pairs = [RatedPair(f"p{n}", f"d{n}", rate) for n, rate in enumerate([gb_per_s, *others])]
    assert is_slow(PullRate(gb_per_s, pull_ms), compute_due_rate(pairs[0], pairs)) is slow


def rate_pairs(slow, usual=lambda p, d: 0.0, *, size: int = 4) -> dict[str, RatedPair]:
    """Pairs by name, of which those for which `slow` is true have a tenth of the others' rate."""
    return {
        f"p{p}-d{d}": RatedPair(f"p{p}", f"d{d}", 2.0 if slow(p, d) else 20.0, usual(p, d))
        for p in range(size)
        for d in range(size)
    }


def find_slow(pairs: dict[str, RatedPair]) -> set[str]:
    every = list(pairs.values())
    return {
        name
        for name, each in pairs.items()
        if is_slow(PullRate(each.bytes_per_s, 100.0), compute_due_rate(each, every))
    }


@pytest.mark.parametrize(
    ("slow", "found"),
    [
        (lambda p, d: p == d == 1, {"p1-d1"}),
        (lambda p, d: p == 3, {f"p3-d{d}" for d in range(4)}),
        (lambda p, d: d == 0, {f"p{p}-d0" for p in range(4)}),
        (lambda p, d: p in (2, 3), {f"p{p}-d{d}" for p in (2, 3) for d in range(4)}),
        (lambda p, d: p % 2 != d % 2, set()),
        (lambda p, d: (p == 0) != (d == 0), set()),
    ],
    ids=["a pair", "a card", "a decode card", "two cards", "two racks", "a node of its own"],
)
def test_pairs_over_slower_links_are_no_slow_pairs(slow, found: set[str]) -> None:
    assert find_slow(rate_pairs(slow)) == found


def test_a_pair_that_is_known_is_compared_with_itself() -> None:
    crosses = lambda p, d: p % 2 != d % 2  # noqa: E731
    usual = lambda p, d: 2.0 if crosses(p, d) else 20.0  # noqa: E731
    assert not find_slow(rate_pairs(crosses, usual))
    fallen = rate_pairs(crosses, usual)
    fallen["p0-d1"] = RatedPair("p0", "d1", 0.2, 2.0)
    fallen["p0-d0"] = RatedPair("p0", "d0", 2.0, 20.0)
    assert find_slow(fallen) == {"p0-d1", "p0-d0"}
    assert not find_slow(rate_pairs(lambda p, d: True, lambda p, d: 20.0)), "the network is busy"


def run(history: PairHistory, results: str, now_s: float = 0.0) -> list[PairStanding]:
    """Standings after each result: + good, - fault, ? showed nothing with too few bytes."""
    seen = []
    for each in results:
        now_s = max(now_s, history.due_s)
        if each == "+":
            history.record_good(now_s, PERIOD_S)
        elif each == "-" or history.record_blurred(now_s, is_deficit=True):
            history.record_fault(now_s)
        seen.append(history.standing)
    return seen


NEW, GOOD = PairStanding.UNPROVEN, PairStanding.PROVEN
SUSPECT, FAILED = PairStanding.SUSPECT, PairStanding.FAILED


@pytest.mark.parametrize(
    ("results", "standings"),
    [
        ("++", [GOOD, GOOD]),
        ("+-++", [GOOD, SUSPECT, SUSPECT, GOOD]),
        ("+--", [GOOD, SUSPECT, FAILED]),
        ("-+-", [SUSPECT, SUSPECT, FAILED]),
        # A fault now and then is one, too.
        ("-+++-", [SUSPECT, SUSPECT, GOOD, GOOD, FAILED]),
        ("--+++", [SUSPECT, FAILED, FAILED, FAILED, GOOD]),
        ("--++-+++", [SUSPECT, FAILED, FAILED, FAILED, FAILED, FAILED, FAILED, GOOD]),
        ("+????", [GOOD] * 5),
        ("+?????", [GOOD] * 5 + [SUSPECT]),
        ("+??+????", [GOOD] * 8),
        ("?", [NEW]),
    ],
)
def test_the_standing_follows_from_the_newest_results(
    results: str, standings: list[PairStanding]
) -> None:
    assert run(PairHistory(0.0), results) == standings


def test_a_fault_that_is_long_past_counts_no_more() -> None:
    assert run(PairHistory(0.0), "-" + "+" * 8 + "-")[-1] is SUSPECT


def test_what_decides_is_due_at_once_and_a_failed_pair_less_and_less_often() -> None:
    history = PairHistory(0.0)
    run(history, "-")
    assert (history.is_urgent, history.due_s) == (True, pair_trust.CONFIRM_S)
    gaps = []
    for _ in range(8):
        before = history.due_s
        run(history, "-")
        gaps.append(history.due_s - before)
    assert gaps == pytest.approx([2.0, 4.0, 8.0, 16.0, 32.0, 45.0, 45.0, 45.0])
    assert not history.is_urgent
    run(history, "+")
    assert history.is_urgent


def test_a_good_canary_that_was_slow_is_soon_followed_by_another() -> None:
    history = PairHistory(0.0)
    history.record_good(10.0, PERIOD_S, seems_slow=True)
    assert (history.standing, history.is_urgent, history.due_s) == (GOOD, True, 12.0)
    history.record_good(12.0, PERIOD_S)
    assert (history.is_urgent, history.due_s) == (False, 32.0)


def test_what_another_gateway_recorded_is_adopted() -> None:
    history = PairHistory(0.0)
    history.restore(FAILED)
    assert run(history, "++") == [FAILED, FAILED]
    assert run(history, "+") == [GOOD]


def test_canaries_that_show_nothing_come_less_and_less_often() -> None:
    history, gaps = PairHistory(0.0), []
    for _ in range(7):
        before = history.due_s
        history.record_blurred(before, is_deficit=False)
        gaps.append(history.due_s - before)
    assert gaps == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]


def test_an_engine_spends_its_share_and_no_more() -> None:
    budget, now, spent_ms = EngineBudget(0.005, 0.0), 0.0, 0.0
    while now < 3_600.0:
        wait_s = budget.get_wait_s(now)
        if not wait_s:
            budget.record(150.0, now)
            spent_ms += 150.0
        now += max(wait_s, 0.5)
    assert spent_ms == pytest.approx(0.005 * 3_600e3 + 600.0, abs=300.0)


def test_prompts_vary_widely_and_take_what_is_allowed_on_average() -> None:
    draws = [random.Random(n).random() for n in range(4_000)]
    tokens = [choose_prompt_tokens(105.0, 5.0, 0.2, 8_000, draw) for draw in draws]
    mean_ms = 5.0 + 0.2 * sum(tokens) / len(tokens)
    assert 75.0 < mean_ms < 105.0
    assert max(tokens) > 7 * min(tokens)


@pytest.mark.parametrize(
    ("allowed_ms", "limit", "least", "most"), [(1.0, 8_000, 64, 128), (1e6, 500, 500, 500)]
)
def test_a_prompt_is_neither_tiny_nor_longer_than_the_model_takes(
    allowed_ms: float, limit: int, least: int, most: int
) -> None:
    for draw in (0.0, 0.5, 1.0):
        assert least <= choose_prompt_tokens(allowed_ms, 5.0, 0.2, limit, draw) <= most
    assert not math.isnan(choose_prompt_tokens(1.0, 0.0, 0.0, 100, 1.0))


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([], 0.0),
        ([5.0], 0.0),
        ([5.0, 10.0], 0.0),
        ([10.0, 5.0, 5.1], 5.0),
        ([5.0, 5.0, 2.5, 2.5], 5.0),
        ([5.0, 10.0, 5.0, 7.0], 5.0),
    ],
    ids=str,
)
def test_the_measure_of_bytes_is_the_most_that_two_samples_agree_on(samples, expected) -> None:
    assert find_block_bytes(samples) == expected
