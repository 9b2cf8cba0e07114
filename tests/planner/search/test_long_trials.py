"""Long trials with the roles that gateways flip, and the mean over several samples."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from cleave.planner.search import long_trials
from cleave.planner.search.candidate_placement import CandidatePlacement, build_deployed_cell
from cleave.planner.search.context import SearchContext
from cleave.planner.search.long_trials import sample_service
from cleave.planner.search.trials import SampledService, Shares, Trials
from cleave.policy.role_flipping import build_thresholds
from cleave.simulator.inter_token_latency import NUM_BINS
from cleave.simulator.outcome import InterTokenLatencies, SimulationResult

from tests.support import known_problems

CHAT = known_problems.search(known_problems.problem(known_problems.chat(6.0)))
ONE = known_problems.of_size(CHAT.problem)
NO_GAPS = InterTokenLatencies(np.zeros(NUM_BINS, np.int64))


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
    assert seeds == [*range(101, 109)]
    assert found.error < 0.01
    assert len(found.ttft_ms) == 8 * trials.compute_span(6.0, CHAT.targets).counted


def test_what_was_sampled_is_not_served_again(monkeypatch) -> None:
    seeds, trials = record_seeds(monkeypatch), Trials(CHAT.problem.demand)
    ample = known_problems.whole(CHAT.problem, ONE, 8)
    assert serve(trials, ample, 6.0) is serve(trials, ample, 6.0)
    assert len(seeds) == 8


def test_samples_on_both_sides_of_the_target_are_forty(monkeypatch) -> None:
    trials, real = Trials(CHAT.problem.demand), Trials.simulate

    def simulate(trials: Trials, *given) -> SimulationResult:
        outcome = real(trials, *given)
        late_ms = np.inf if trials.seed % 8 == 5 else 0.0
        return replace(
            outcome,
            prefill_end_ms=outcome.prefill_end_ms + late_ms,
            first_token_ms=outcome.first_token_ms + late_ms,
        )

    monkeypatch.setattr(Trials, "simulate", simulate)
    found = serve(trials, known_problems.whole(CHAT.problem, ONE, 8), 6.0)
    assert found.error > 0.01
    assert len(found.ttft_ms) == 40 * trials.compute_span(6.0, CHAT.targets).counted


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
