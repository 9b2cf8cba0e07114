"""Long trials with the roles that gateways flip, and the mean over several samples."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest

from cleave.planner.search import long_trials
from cleave.planner.search.candidate_placement import CandidatePlacement, build_deployed_cell
from cleave.planner.search.context import SearchContext
from cleave.planner.search.long_trials import SampledService, sample_service
from cleave.planner.search.trials import Shares, Trials, TrialSpan
from cleave.policy.role_flipping import build_thresholds
from cleave.simulator.fleet import SimulatedFleet
from cleave.simulator.inter_token_latency import NUM_BINS
from cleave.simulator.outcome import InterTokenLatencies, SimulationResult

from tests.support import known_problems

CHAT = known_problems.search(known_problems.problem(known_problems.chat(6.0)))
ONE = known_problems.of_size(CHAT.problem)
NO_GAPS = InterTokenLatencies(np.zeros(NUM_BINS, np.int64))
ANY_FLEET = SimulatedFleet()


def serve(trials: Trials, placement: CandidatePlacement, rate: float) -> SampledService:
    fleet = build_deployed_cell(CHAT.problem, placement, 0)
    span = trials.compute_span(rate, CHAT.targets)
    return sample_service(trials, fleet, rate, span, CHAT.targets)


def record_seeds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seeds of all simulations from now on."""
    seeds, simulate = [], Trials.simulate

    def record(trials: Trials, *more) -> SimulationResult:
        seeds.append(trials.seed)
        return simulate(trials, *more)

    monkeypatch.setattr(Trials, "simulate", record)
    return seeds


def test_samples_are_none_of_the_searchs_and_end_when_they_agree(monkeypatch) -> None:
    seeds, trials = record_seeds(monkeypatch), Trials(CHAT.problem.demand)
    found = serve(trials, known_problems.whole(CHAT.problem, ONE, 8), 6.0)
    assert seeds == [*range(trials.fingerprint + 101, trials.fingerprint + 105)]
    assert found.error < 0.02
    assert len(found.ttft_ms) == 4 * trials.compute_span(6.0, CHAT.targets).counted


def test_what_was_sampled_is_not_served_again(monkeypatch) -> None:
    seeds, trials = record_seeds(monkeypatch), Trials(CHAT.problem.demand)
    ample = known_problems.whole(CHAT.problem, ONE, 8)
    assert serve(trials, ample, 6.0).attainment == serve(trials, ample, 6.0).attainment
    assert len(seeds) == 4


def test_workloads_have_samples_of_their_own_for_all_rates() -> None:
    demand = CHAT.problem.demand
    longer = known_problems.blog().demand
    own = Trials(demand).fingerprint
    assert Trials(demand.with_rate(60.0), seed=5).fingerprint == own
    assert Trials(longer).fingerprint != own


def script_shares(monkeypatch: pytest.MonkeyPatch, share: float, collapsed: float) -> float:
    """Samples of which one in six collapses, by chance; returns the mean share of all."""

    def simulate(trials: Trials, fleet, rate, span) -> SimpleNamespace:
        chance = np.random.default_rng(trials.seed).random()
        late = np.arange(span.total) % 100 / 100 >= (collapsed if chance < 1 / 6 else share)
        return SimpleNamespace(ttft_ms=np.where(late, np.inf, 0.0), tpot_ms=0.0 * late, itl=NO_GAPS)

    monkeypatch.setattr(Trials, "simulate", simulate)
    return (5 * share + collapsed) / 6


def test_a_figure_that_is_shown_is_unbiased_and_its_interval_covers_the_mean(monkeypatch) -> None:
    mean = script_shares(monkeypatch, 0.96, 0.72)
    span, trials = TrialSpan(4_950, 100), Trials(CHAT.problem.demand)
    found = [
        sample_service(
            trials.with_seed(1000 * seed), ANY_FLEET, 6.0, span, CHAT.targets, is_shown=True
        )
        for seed in range(60)
    ]
    assert np.mean([each.attainment for each in found]) == pytest.approx(mean, abs=0.004)
    assert np.mean([abs(each.attainment - mean) <= each.error for each in found]) > 0.92


def test_a_decision_takes_fewer_samples_than_a_figure_that_is_shown(monkeypatch) -> None:
    script_shares(monkeypatch, 0.96, 0.72)
    span, trials = TrialSpan(4_950, 100), Trials(CHAT.problem.demand)
    decided, shown = (
        len(sample_service(trials, ANY_FLEET, 6.0, span, CHAT.targets, is_shown=is_shown).ttft_ms)
        for is_shown in (False, True)
    )
    assert 4 * span.counted <= decided < shown <= 100 * span.counted


def test_a_target_that_little_may_miss_is_known_as_much_more_finely(monkeypatch) -> None:
    script_shares(monkeypatch, 0.99, 0.97)
    span, trials = TrialSpan(4_950, 100), Trials(CHAT.problem.demand)
    counts = [
        len(sample_service(trials, ANY_FLEET, 6.0, span, targets).ttft_ms)
        for targets in (CHAT.targets, replace(CHAT.targets, attainment=0.985))
    ]
    assert counts[1] > counts[0] == 4 * span.counted
    own = replace(CHAT.targets, attainment=0.5, ttft_attainment=0.985)
    assert len(sample_service(trials, ANY_FLEET, 6.0, span, own).ttft_ms) > counts[0]


@dataclass
class Scripted(Trials):
    """Shares in time with fixed roles and with those that flip, without a simulation."""

    fixed: float = 0.0
    flipped: float = 0.0

    def measure_shares(self, fleet, rate, targets, span, least=0.0) -> Shares:
        met = self.flipped if fleet.flipping else self.fixed
        return Shares(met, met, met, 0.0, (0, 0, 0))


@pytest.fixture(autouse=True)
def _scripted_samples(monkeypatch) -> None:
    """Samples of `Scripted` trials are not simulated either."""

    def sample(trials: Trials, fleet, rate, span, targets) -> SampledService:
        if not isinstance(trials, Scripted):
            return sample_service(trials, fleet, rate, span, targets)
        met = trials.measure_shares(fleet, rate, targets, span).both
        return SampledService(met, 0.0, met, met, met, np.zeros(0), np.zeros(0), NO_GAPS)

    monkeypatch.setattr(long_trials, "sample_service", sample)


def build_search(fixed: float, flipped: float) -> SearchContext:
    problem = known_problems.problem()
    policies = replace(problem.policies, flipping=build_thresholds(problem.slo.ttft_ms))
    problem = replace(problem, policies=policies)
    trials = Scripted(problem.demand, fixed=fixed, flipped=flipped)
    return replace(known_problems.search(problem), trials=trials)


def pair(search: SearchContext) -> CandidatePlacement:
    candidate = known_problems.of_size(search.problem)
    return known_problems.split(search.problem, candidate, 2, candidate, 2)


@pytest.mark.parametrize(("fixed", "flipped"), [(0.92, 0.899), (0.99, 0.5), (0.89, 0.95)])
def test_what_misses_the_target_with_fixed_or_flipped_roles_does_not_hold(
    fixed: float, flipped: float
) -> None:
    search = build_search(fixed, flipped)
    assert not long_trials.holds(search, pair(search))


def test_what_nearly_holds_where_roles_flip_is_noted() -> None:
    search = build_search(0.92, 0.899)
    long_trials.holds(search, pair(search))
    assert [each.share for each in search.close_calls] == [0.899]


def test_mixed_instances_have_no_roles_to_flip() -> None:
    search = build_search(0.92, 0.5)
    candidate = known_problems.of_size(search.problem)
    assert long_trials.holds(search, known_problems.whole(search.problem, candidate))
    assert long_trials.holds(build_search(0.92, 0.91), pair(search))
