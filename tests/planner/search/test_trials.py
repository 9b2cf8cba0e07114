"""Trials: the same requests at every rate, and a window without the empty ends."""

import math
from dataclasses import replace

import numpy as np
import pytest

from cleave.planner.problem import Policies
from cleave.planner.search import goodput
from cleave.planner.search.candidate_placement import build_cell
from cleave.planner.search.trials import CONFIRMATION_PRECISION, RANKING_PRECISION, Targets, Trials
from cleave.simulator.inter_token_latency import NUM_BINS, compute_middles
from cleave.simulator.outcome import InterTokenLatencies, compute_quantile
from cleave.traffic.conversations import Conversations
from cleave.traffic.workload import (
    Demand,
    FixedLength,
    GeneratedRequests,
    IndependentLengths,
    LogNormal,
)

from tests.support import known_problems


def test_the_drawn_rate_is_the_requested_rate() -> None:
    trace = Trials(known_problems.chat()).build_trace(1000, 7.0)
    assert trace.arrival_ms[-1] == pytest.approx(1000 / 7.0 * 1000)


def test_another_rate_is_the_same_requests_stretched() -> None:
    trials = Trials(known_problems.chat())
    slow, fast = trials.build_trace(500, 2.0), trials.build_trace(500, 8.0)
    assert np.array_equal(slow.prompt_tokens, fast.prompt_tokens)
    assert slow.arrival_ms == pytest.approx(fast.arrival_ms * 4)


def test_another_seed_is_other_requests_and_one_tally() -> None:
    trials = Trials(known_problems.chat())
    other = trials.with_seed(1)
    assert not np.array_equal(
        trials.build_trace(100, 1).prompt_tokens, other.build_trace(100, 1).prompt_tokens
    )
    assert other.tally is trials.tally


def test_a_trial_lasts_until_an_overload_of_one_percent_shows() -> None:
    # A queue that grows by 1 % of the time passes a target of 3 s after 300 s.
    span = Trials(known_problems.chat()).compute_span(20.0, Targets(3000, 10, 0.9))
    assert span.counted / 20.0 == pytest.approx(300)


def test_requests_that_arrive_while_the_fleet_fills_or_runs_dry_are_not_counted() -> None:
    trials = Trials(known_problems.blog().demand)
    span = trials.compute_span(10.0, Targets(400, 40, 0.9))
    # A life is at most 400 ms + 63 * 40 ms, in which 29.2 requests arrive.
    assert span.ramp == 30
    assert span.total == span.counted + 60
    assert span.window == slice(30, 30 + span.counted)


def test_long_trials_are_longer_than_those_that_only_compare() -> None:
    trials, targets = Trials(known_problems.chat()), Targets(200, 100, 0.9)
    assert trials.with_precision(RANKING_PRECISION).compute_span(5, targets).counted >= 1000
    assert trials.with_precision(CONFIRMATION_PRECISION).compute_span(5, targets).counted >= 10_000


def test_shares_are_those_of_the_counted_requests_and_all_simulated_ones_are_tallied() -> None:
    problem = known_problems.problem()
    trials, targets = Trials(problem.demand), known_problems.targets(problem)
    fleet = build_cell(problem, known_problems.whole(problem, known_problems.of_size(problem)))
    span = trials.compute_span(6.0, targets)
    shares = trials.measure_shares(fleet, 6.0, targets, span)
    outcome = trials.simulate(fleet, 6.0, span)
    met = (outcome.ttft_ms <= 200) & (outcome.tpot_ms <= 100)
    assert shares.both == np.mean(met[span.window])
    assert shares.both <= min(shares.ttft, shares.tpot)
    assert trials.tally.trials == 2
    arrived = trials.tally.requests - span.total
    assert span.ramp + span.counted <= arrived <= span.total


@pytest.mark.parametrize("rate", [3.0, 6.0, 7.0, 9.0, 40.0])
@pytest.mark.parametrize("least", [0.0, 0.66, 0.9, 1.0])
def test_a_trial_ends_early_only_below_the_least_share(rate: float, least: float) -> None:
    problem = known_problems.problem()
    trials, targets = Trials(problem.demand), known_problems.targets(problem)
    fleet = build_cell(problem, known_problems.whole(problem, known_problems.of_size(problem)))
    span = trials.compute_span(rate, targets)
    outcome = trials.simulate(fleet, rate, span)
    is_met = (outcome.ttft_ms <= targets.ttft_ms) & (outcome.tpot_ms <= targets.tpot_ms)
    attained = float(np.mean(is_met[span.window]))
    share = trials.measure_shares(fleet, rate, targets, span, least).both
    if attained >= least:
        assert share == attained
    else:
        assert share <= attained
        assert share < least
    is_held = attained >= targets.attainment
    assert trials.holds(fleet, rate, targets, span) is is_held


def test_an_early_end_does_not_change_a_bisection() -> None:
    problem = known_problems.problem()
    targets = known_problems.targets(problem)
    fleet = build_cell(problem, known_problems.whole(problem, known_problems.of_size(problem)))

    class Complete(Trials):
        def measure_shares(self, fleet, rate, targets, span, least=0.0):
            return super().measure_shares(fleet, rate, targets, span)

    for seed in range(3):
        early = goodput.find_goodput(Trials(problem.demand, seed), fleet, targets)
        assert early == goodput.find_goodput(Complete(problem.demand, seed), fleet, targets)


def chats(rate: float = 10.0) -> Demand:
    source = replace(known_problems.chat().source, conversations=Conversations(6, 200, 64))
    return Demand(rate, source, 2048)


def test_requests_that_fill_caches_come_before_those_that_are_counted() -> None:
    trials, targets = Trials(chats()), Targets(200, 100, 0.9)
    span = trials.compute_span(5.0, targets)
    # Nine tenths of repetitions lie within 2.3 mean intervals of 200 requests.
    assert span.warmup == pytest.approx(460, rel=0.1)
    assert span.window == slice(span.warmup + span.ramp, span.total - span.ramp)
    assert Trials(known_problems.chat()).compute_span(5.0, targets).warmup == 0
    assert trials.build_trace(50, 1.0).blocks is not None


@pytest.mark.parametrize("rate", [1.0, 50.0, 10_000.0])
@pytest.mark.parametrize("interval_requests", [20, 100_000])
def test_trials_of_long_prompts_with_few_new_tokens_have_a_bounded_number_of_blocks(
    rate: float, interval_requests: float
) -> None:
    lengths = IndependentLengths(LogNormal.from_mean_and_p90(30_000, 60_000), FixedLength(200))
    chats = Conversations(20, interval_requests, 16, 4000)
    demand = Demand(rate, GeneratedRequests(lengths, conversations=chats), 131_072)
    trials = Trials(demand, precision=CONFIRMATION_PRECISION)
    span = trials.compute_span(rate, Targets(2000, 50, 0.9))
    blocks = trials.build_trace(span.total, rate).blocks
    # Without a bound, 1,875 for each of up to 620,000 requests.
    assert len(blocks.numbers) < 2_200_000
    assert span.counted > 7000
    assert span.warmup <= span.total / 2


def test_trials_of_all_lengths_draw_few_samples() -> None:
    drawn = []

    class Recorder(GeneratedRequests):
        def draw(self, num, seed):
            drawn.append(num)
            return super().draw(num, seed)

    source = Recorder(known_problems.chat().source.lengths)
    trials = Trials(Demand(10.0, source, 2048))
    for num in range(1000, 2000, 50):
        trace = trials.build_trace(num, 5.0)
        assert len(trace) == num
        assert trace.rate == pytest.approx(5.0, rel=0.01)
    assert drawn == [1024, 2048]


def test_a_trial_finds_in_caches_what_bounds_allow_at_most() -> None:
    problem = known_problems.problem(chats(), policies=Policies())
    trials, targets = Trials(problem.demand), known_problems.targets(problem)
    fleet = build_cell(problem, known_problems.whole(problem, known_problems.of_size(problem)))
    span = trials.compute_span(4.0, targets)
    outcome = trials.simulate(fleet, 4.0, span)
    most = trials.build_trace(span.total, 4.0).bound_cached_tokens()
    assert (outcome.cached_tokens <= most).all()
    assert outcome.cached_tokens[span.window].sum() > 0.4 * most[span.window].sum()
    # A rate that is only possible because prompts repeat is not excluded.
    served = goodput.find_goodput(trials, fleet, targets).rate
    blind = goodput.find_goodput(Trials(chats().without_reuse()), fleet, targets).rate
    assert served > 1.05 * blind


@pytest.mark.parametrize("attainment", [0.9, 0.99, 1.0])
def test_late_tokens_count_on_the_scale_of_late_requests(attainment: float) -> None:
    targets = Targets(400, 40, attainment, itl_p99_ms=50.0)
    middles = compute_middles()

    def rate_late(percent: float) -> float:
        counts = np.zeros(NUM_BINS, np.int64)
        counts[np.searchsorted(middles, 20.0)] = round(1000 * (100 - percent))
        counts[np.searchsorted(middles, 80.0)] = round(1000 * percent)
        share = InterTokenLatencies(counts).compute_share(targets.itl_p99_ms)
        return targets.scale_own(1.0, 1.0, share)[2]

    assert rate_late(0.0) == 1.0
    assert rate_late(0.9) >= attainment
    assert rate_late(1.1) < attainment or rate_late(1.1) == 0.0
    assert rate_late(0.5) == pytest.approx(1.0 if attainment == 1 else (1 + attainment) / 2)
    assert rate_late(100.0) == 0.0
    assert InterTokenLatencies(middles > 0).compute_share(math.inf) == 1.0


def test_a_share_of_one_latency_alone_counts_on_the_same_scale() -> None:
    targets = Targets(400, 40, 0.9, tpot_attainment=0.99)
    assert targets.scale_own(0.5, 0.99, 1.0) == pytest.approx((1.0, 0.9, 1.0))
    assert targets.scale_own(1.0, 0.98, 1.0)[1] == pytest.approx(0.8)
    assert targets.scale_own(1.0, 0.995, 1.0)[1] == pytest.approx(0.95)
    all_of_them = replace(targets, ttft_attainment=1.0)
    assert all_of_them.scale_own(0.999, 1.0, 1.0) == (0.0, 1.0, 1.0)


def test_a_percentile_of_one_latency_fails_a_trial_that_both_would_pass() -> None:
    problem = known_problems.problem()
    fleet = build_cell(problem, known_problems.whole(problem, known_problems.of_size(problem)))
    trials, rate = Trials(problem.demand), 4.0
    span = trials.compute_span(rate, Targets(400, 100, 0.9))
    outcome = trials.simulate(fleet, rate, span)
    p95 = compute_quantile(outcome.tpot_ms[span.window], 0.95)
    targets = Targets(10_000.0, p95 + 0.001, 0.9)
    for own, holds in ((0.0, True), (0.94, True), (0.96, False)):
        assert trials.holds(fleet, rate, replace(targets, tpot_attainment=own), span) is holds


def test_stalls_of_mixed_instances_fail_a_trial_that_means_would_pass() -> None:
    problem = known_problems.problem(known_problems.chat(3.0, 1000, 100), policies=Policies())
    search = known_problems.search(problem)
    placement = known_problems.whole(problem, known_problems.of_size(problem))
    fleet = build_cell(problem, placement)
    trials, targets = search.trials, Targets(1600, 100, 0.9)
    span = trials.compute_span(3.0, targets)
    assert trials.holds(fleet, 3.0, targets, span)
    assert trials.holds(fleet, 3.0, replace(targets, itl_p99_ms=400.0), span)
    assert not trials.holds(fleet, 3.0, replace(targets, itl_p99_ms=100.0), span)
    assert not trials.holds(fleet, 3.0, replace(targets, itl_p99_ms=40.0), span)
