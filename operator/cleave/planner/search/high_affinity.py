"""Algorithm 1: prefill and decode optimised independently, then replicated.

DistServe, section 4.1, for networks on which KV transfers are cheap: any prefill instance works
with any decode instance, also with one on another GPU type.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cleave.api.role import Parallelism, Role
from cleave.planner.problem import Problem
from cleave.planner.search import ranking
from cleave.planner.search.batch_limits import refined
from cleave.planner.search.candidate_placement import Draft, Group, cell_fleet, weight_in
from cleave.planner.search.candidates import Candidate, by_gpu, decode_instance, prefill_instance
from cleave.planner.search.ranking import Entry, Rated
from cleave.planner.search.trials import Targets, Trials
from cleave.simulator.fleet import Fleet


@dataclass(frozen=True, slots=True)
class Phases:
    """The best instance of each phase on one GPU type; None: it never meets the phase's target."""

    gpu: str
    prefill: Rated | None
    decode: Rated | None


def optimise(
    problem: Problem,
    trials: Trials,
    candidates: Sequence[Candidate],
    targets: Targets,
    tick: Callable[[], None] = lambda: None,
) -> tuple[Phases, ...]:
    """Algorithm 1's loops (simu_prefill, simu_decode), for each GPU type."""

    def best(tried: list[Entry], alone: Targets) -> Rated | None:
        return ranking.best(trials, tried, alone, weight_in(problem), tick)

    return _phases(problem, trials, candidates, targets, best)


def fewest(
    problem: Problem,
    trials: Trials,
    candidates: Sequence[Candidate],
    targets: Targets,
    tick: Callable[[], None] = lambda: None,
) -> tuple[Phases, ...]:
    """Per phase, the instances whose replicas for the requested rate need least resources."""

    def least(tried: list[Entry], alone: Targets) -> Rated | None:
        return ranking.fewest(trials, tried, alone, weight_in(problem), problem.rate, tick)

    return _phases(problem, trials, candidates, targets, least)


def pairs(problem: Problem, phases: Sequence[Phases]) -> list[tuple[Rated, Rated]]:
    """All pairs of a prefill instance and a decode instance that can pull its KV, across GPU
    types."""
    return [
        (prefill, decode)
        for prefill in _distinct([each.prefill for each in phases])
        for decode in _distinct([each.decode for each in phases])
        if problem.can_pair(_parallelism(prefill), _parallelism(decode))
    ]


def replicated(prefill: Rated, decode: Rated, rate: float) -> Draft:
    """Replicas of both such that each phase serves `rate`: n = ceil(R / goodput)."""
    groups = [
        Group(group.role, group.instance, math.ceil(rate / rated.goodput.rate))
        for rated in (prefill, decode)
        for group in rated.draft.groups
    ]
    return Draft(tuple(groups))


def single(problem: Problem, candidate: Candidate, role: Role) -> Draft:
    """A placement of one instance of one role."""
    instantiate = prefill_instance if role is Role.PREFILL else decode_instance
    return Draft((Group(role, instantiate(problem, candidate), 1),))


def _phases(
    problem: Problem,
    trials: Trials,
    candidates: Sequence[Candidate],
    targets: Targets,
    choose: Callable[[list[Entry], Targets], Rated | None],
) -> tuple[Phases, ...]:
    """The choice of `choose` for either phase, on each GPU type."""

    def phase(of_kind: Sequence[Candidate], role: Role, alone: Targets) -> Rated | None:
        def chosen(placements: list[Draft]) -> Rated | None:
            return choose(ranking.entries(problem, trials, placements, _phase_fleet), alone)

        return refined(chosen([single(problem, each, role) for each in of_kind]), chosen)

    return tuple(
        Phases(
            gpu,
            phase(of_kind, Role.PREFILL, targets.prefill_only),
            phase(of_kind, Role.DECODE, targets.decode_only),
        )
        for gpu, of_kind in by_gpu(candidates).items()
    )


def _phase_fleet(problem: Problem, placement: Draft) -> Fleet:
    """The fleet of one phase. In simu_decode requests arrive with their first token, so waits count
    in TPOT."""
    return replace(cell_fleet(problem, placement), first_token_by_decode=False)


def _parallelism(rated: Rated) -> Parallelism:
    return rated.draft.groups[0].instance.candidate.parallelism


def _distinct(rated: Sequence[Rated | None]) -> list[Rated]:
    return list({each.draft: each for each in rated if each is not None}.values())
