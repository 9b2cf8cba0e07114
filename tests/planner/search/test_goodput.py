"""Goodput by bisection: known answers, convergence, doubts."""

from dataclasses import dataclass, field

import pytest

from cleave.api.deployment import Slo
from cleave.planner.problem import Problem
from cleave.planner.search import goodput
from cleave.planner.search.candidate_placement import CandidatePlacement, build_cell
from cleave.planner.search.trials import CONFIRMATION_PRECISION, Shares, Targets, Trials
from cleave.simulator.fleet import SimulatedFleet

from tests.support import known_problems


def colocated(problem: Problem) -> SimulatedFleet:
    return build_cell(problem, known_problems.whole(problem, known_problems.of_size(problem)))


def test_the_attainment_target_is_met_at_the_goodput_and_missed_above() -> None:
    problem = known_problems.problem()
    trials, targets, fleet = (
        Trials(problem.demand),
        known_problems.targets(problem),
        colocated(problem),
    )
    found = goodput.find_goodput(trials, fleet, targets)
    span = trials.compute_span(found.rate, targets)
    assert found.attainment >= 0.9
    assert trials.measure_shares(fleet, found.rate * 0.97, targets, span).both >= 0.9
    assert trials.measure_shares(fleet, found.rate * 1.04, targets, span).both < 0.9


@pytest.mark.parametrize(("ttft", "tpot"), [(1.5, 1.0), (1.0, 1.5), (2.0, 2.0)])
def test_a_looser_slo_never_lowers_the_goodput(ttft: float, tpot: float) -> None:
    problem = known_problems.blog()
    trials, fleet = Trials(problem.demand), colocated(problem)
    tight = goodput.find_goodput(trials, fleet, Targets(400, 40, 0.9))
    loose = goodput.find_goodput(trials, fleet, Targets(400 * ttft, 40 * tpot, 0.9))
    assert loose.rate >= tight.rate * 0.99


def test_a_higher_attainment_target_never_raises_the_goodput() -> None:
    problem = known_problems.blog()
    trials, fleet = Trials(problem.demand), colocated(problem)
    rates = [
        goodput.find_goodput(trials, fleet, Targets(400, 40, target)).rate
        for target in (0.8, 0.9, 0.99)
    ]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("engine", ["distserve", "vllm"])
def test_a_thousand_requests_say_within_five_percent_what_ten_thousand_say(engine: str) -> None:
    problem = known_problems.blog(engine=engine)
    targets, fleet = known_problems.targets(problem), colocated(problem)
    short = goodput.find_goodput(Trials(problem.demand), fleet, targets)
    long = goodput.find_goodput(
        Trials(problem.demand, precision=CONFIRMATION_PRECISION), fleet, targets
    )
    assert short.rate == pytest.approx(long.rate, rel=0.05)


def test_targets_that_an_idle_instance_misses_give_no_goodput_and_take_no_simulation() -> None:
    problem = known_problems.blog()
    trials = Trials(problem.demand)
    assert goodput.find_goodput(trials, colocated(problem), Targets(50, 40, 0.9)).rate == 0
    assert trials.tally.trials == 0


def test_a_fleet_that_holds_no_rate_under_any_seed_has_no_goodput() -> None:
    problem = known_problems.blog()
    found = goodput.confirm_goodput(
        Trials(problem.demand), colocated(problem), Targets(50, 40, 0.9), goodput.Goodput(1.0, 0.0)
    )
    assert (found.rate, found.interval) == (0, (0, 0))


def test_a_fleet_that_fails_at_the_rate_to_beat_is_given_up_after_one_trial() -> None:
    problem = known_problems.blog()
    trials = Trials(problem.demand)
    found = goodput.find_goodput(
        trials, colocated(problem), known_problems.targets(problem), at_least=6.0
    )
    assert found.rate == 0
    assert found.attainment < 0.9
    assert trials.tally.trials == 1


def test_no_rate_above_what_memory_and_passes_allow_is_believed() -> None:
    # Requests that wait for memory miss a lax TPOT only after a long time: a short trial at a
    # rate that no instance can keep up with still looks good.
    problem = known_problems.problem()
    trials, targets = Trials(problem.demand), Targets(float("inf"), 1000, 0.9)
    candidate = known_problems.of_size(problem)
    decode = CandidatePlacement(
        known_problems.split(problem, candidate, 1, candidate, 1).groups[1:]
    )
    fleet = build_cell(problem, decode)
    found = goodput.find_goodput(trials, fleet, targets)
    span = trials.compute_span(found.rate, targets)
    assert trials.measure_shares(fleet, found.rate * 1.05, targets, span).both >= 0.9
    assert found.rate < 8.5


def test_a_fleet_that_serves_far_more_than_requested_is_not_tried_to_its_end() -> None:
    fast = (("fast", known_problems.Kind(prompt=1e-4, decode=1e-4)),)
    supplies = (known_problems.nodes(gpu="fast"),)
    problem = known_problems.problem(known_problems.chat(3.0), supplies=supplies, kinds=fast)
    trials, targets = Trials(problem.demand), known_problems.targets(problem)
    candidate = known_problems.of_size(problem)
    fleet = build_cell(problem, known_problems.whole(problem, candidate))
    found = goodput.find_goodput(trials, fleet, targets)
    assert found.rate == pytest.approx(trials.max_rate, rel=2 * goodput.TOLERANCE)
    assert trials.max_rate == 500
    assert Trials(known_problems.chat(3000.0)).max_rate == 6000


def test_the_interval_holds_the_mean_of_many_more_samples() -> None:
    problem = known_problems.blog()
    targets, fleet = known_problems.targets(problem), colocated(problem)
    trials = Trials(problem.demand)
    first = goodput.find_goodput(trials, fleet, targets)
    found = goodput.confirm_goodput(
        trials.with_precision(CONFIRMATION_PRECISION), fleet, targets, first
    )
    others = [
        goodput.find_goodput_near(
            Trials(problem.demand, 100 + seed, CONFIRMATION_PRECISION), fleet, targets, first.rate
        ).rate
        for seed in range(10)
    ]
    assert found.interval is not None
    low, high = found.interval
    assert low < found.rate < high
    assert low * 0.99 < sum(others) / len(others) < high * 1.01
    assert found.is_monotone


def test_the_same_seed_gives_the_same_answer() -> None:
    problem = known_problems.problem()
    fleet, targets = colocated(problem), known_problems.targets(problem)
    one, other = (goodput.find_goodput(Trials(problem.demand, 3), fleet, targets) for _ in range(2))
    assert one == other


@dataclass
class Scripted(Trials):
    """Attainment as a function of the rate, without a simulation."""

    bands: list[tuple[float, float]] = field(default_factory=list)
    """Rates between which the attainment target is met."""

    def measure_shares(self, fleet, rate, targets, span, least=0.0) -> Shares:
        met = 1.0 if any(low <= rate <= high for low, high in self.bands) else 0.0
        return Shares(met, met, met, 0.0, (0, 0, 0))


@pytest.mark.parametrize("goodput_", [0.5, 2.0, 2.7, 3.3, 7.0])
def test_bisection_finds_the_edge_wherever_it_lies(goodput_: float) -> None:
    problem = known_problems.blog()
    trials = Scripted(problem.demand, bands=[(0, goodput_)])
    found = goodput.find_goodput(trials, colocated(problem), known_problems.targets(problem))
    assert found.rate == pytest.approx(goodput_, rel=0.011)
    assert found.rate <= goodput_


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_a_search_that_starts_far_below_finds_no_higher_goodput(share: float) -> None:
    problem = known_problems.problem(known_problems.chat(3.0), Slo(ttft_ms=124, tpot_ms=104))
    trials, targets = Trials(problem.demand), known_problems.targets(problem)
    candidate = known_problems.of_size(problem, 4)
    fleet = build_cell(problem, known_problems.whole(problem, candidate))
    found = goodput.find_goodput(trials, fleet, targets).rate
    low = goodput.find_goodput_near(trials, fleet, targets, share * found)
    assert low.rate == pytest.approx(found, rel=0.03)


def test_attainment_that_rises_again_with_the_rate_is_noticed() -> None:
    problem = known_problems.blog()
    trials = Scripted(problem.demand, bands=[(0, 2.0), (2.3, 2.45)])
    found = goodput.find_goodput_near(
        trials, colocated(problem), known_problems.targets(problem), 2.0
    )
    assert found.rate <= 2.0
    fleet = colocated(problem)
    assert not goodput._is_monotone(trials, fleet, known_problems.targets(problem), 2.0)
    assert goodput._is_monotone(
        Scripted(problem.demand, bands=[(0, 2.0)]), fleet, known_problems.targets(problem), 2
    )
