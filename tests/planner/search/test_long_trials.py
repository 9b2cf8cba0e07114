"""Long trials with the roles that gateways flip."""

from dataclasses import dataclass, replace

import pytest

from cleave.planner.search import long_trials
from cleave.planner.search.candidate_placement import CandidatePlacement
from cleave.planner.search.context import SearchContext
from cleave.planner.search.trials import Shares, Trials
from cleave.policy.role_flipping import build_thresholds

from tests.support import known_problems


@dataclass
class Scripted(Trials):
    """Shares in time with fixed roles and with those that flip, without a simulation."""

    fixed: float = 0.0
    flipped: float = 0.0

    def measure_shares(self, fleet, rate, targets, span, least=0.0) -> Shares:
        met = self.flipped if fleet.flipping else self.fixed
        return Shares(met, met, met, 0.0, (0, 0, 0))


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
