"""Branch and bound: what is skipped would not have won."""

import pytest

from cleave.planner.problem import Problem
from cleave.planner.search import goodput, ranking
from cleave.planner.search.candidate_placement import CandidatePlacement, build_cell
from cleave.planner.search.candidates import list_candidates
from cleave.planner.search.context import SearchContext
from cleave.planner.search.trials import Targets, Trials

from tests.support import known_problems

SLOS = [(200, 100), (400, 40), (120, 30)]


def drafts(problem: Problem) -> list[CandidatePlacement]:
    small = [each for each in list_candidates(problem) if each.gpus <= 8]
    return [known_problems.whole(problem, each) for each in small] + [
        known_problems.split(problem, one, 1, other, 1) for one in small[:4] for other in small[:4]
    ]


def everything(
    problem: Problem, trials: Trials, targets: Targets
) -> dict[CandidatePlacement, float]:
    return {
        draft: goodput.find_goodput(trials, build_cell(problem, draft), targets).rate
        for draft in drafts(problem)
    }


@pytest.mark.parametrize("slo", SLOS)
def test_the_best_per_gpu_is_that_of_an_exhaustive_search(slo: tuple[float, float]) -> None:
    problem = known_problems.problem()
    trials, targets = Trials(problem.demand), Targets(*slo, 0.9)
    search = SearchContext(problem, trials, targets)
    found = ranking.find_best(search, ranking.bound_placements(search, drafts(problem)))
    rates = everything(problem, trials, targets)
    assert found is not None
    assert found.per_resource == pytest.approx(
        max(rate / draft.gpus for draft, rate in rates.items()), rel=0.015
    )


def test_skipping_saves_most_simulations() -> None:
    problem = known_problems.problem()
    targets = Targets(200, 100, 0.9)
    pruned, exhaustive = Trials(problem.demand), Trials(problem.demand)
    search = SearchContext(problem, pruned, targets)
    ranking.find_best(search, ranking.bound_placements(search, drafts(problem)))
    everything(problem, exhaustive, targets)
    assert pruned.tally.trials < exhaustive.tally.trials / 2


def test_where_no_draft_meets_the_targets_there_is_no_best() -> None:
    problem = known_problems.problem()
    search = known_problems.search(problem, Targets(10, 5, 0.9))
    entries = ranking.bound_placements(search, drafts(problem))
    assert ranking.find_best(search, entries) is None
