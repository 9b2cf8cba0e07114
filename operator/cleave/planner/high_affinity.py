"""Algorithm 1: prefill and decode optimised apart, then replicated.

DistServe, section 4.1, for networks on which KV travels freely: any prefill instance works with any
decode instance, which may then be of another kind of GPU as well.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cleave.api.role import Role
from cleave.planner import rating
from cleave.planner.candidates import Candidate, decode_instance, prefill_instance
from cleave.planner.draft import Draft, Group, cell_fleet
from cleave.planner.problem import Problem
from cleave.planner.rating import Rated
from cleave.planner.trials import Targets, Trials


@dataclass(frozen=True, slots=True)
class Phases:
    """The best instance of each phase on one kind of GPU; None: the phase's target is never met."""

    gpu: str
    prefill: Rated | None
    decode: Rated | None


def optimise(
    problem: Problem,
    trials: Trials,
    found: Sequence[Candidate],
    targets: Targets,
    tick: Callable[[], None] = lambda: None,
) -> tuple[Phases, ...]:
    """Algorithm 1's loops, for each kind of GPU: simu_prefill and simu_decode."""
    return tuple(
        Phases(
            gpu,
            _phase(problem, trials, of_kind, Role.PREFILL, targets.prefill_only, tick),
            _phase(problem, trials, of_kind, Role.DECODE, targets.decode_only, tick),
        )
        for gpu, of_kind in _by_gpu(found).items()
    )


def pairs(phases: Sequence[Phases], rate: float) -> list[Draft]:
    """Replicas for `rate`, for every pair of kinds: n = ceil(R / goodput) and likewise m."""
    return [
        replicated(one.prefill, other.decode, rate)
        for one in phases
        for other in phases
        if one.prefill and other.decode
    ]


def replicated(prefill: Rated, decode: Rated, rate: float) -> Draft:
    """So many instances of both that each phase holds `rate`."""
    groups = [
        Group(group.role, group.instance, math.ceil(rate / rated.goodput.rate))
        for rated in (prefill, decode)
        for group in rated.draft.groups
    ]
    return Draft(tuple(groups))


def single(problem: Problem, candidate: Candidate, role: Role) -> Draft:
    """One instance of one phase."""
    instantiate = prefill_instance if role is Role.PREFILL else decode_instance
    return Draft((Group(role, instantiate(problem, candidate), 1),))


def _phase(
    problem: Problem,
    trials: Trials,
    found: Sequence[Candidate],
    role: Role,
    targets: Targets,
    tick: Callable[[], None],
) -> Rated | None:
    drafts = [single(problem, candidate, role) for candidate in found]
    entries = [rating.bounded(trials, draft, cell_fleet(problem, draft)) for draft in drafts]
    return rating.best(
        trials, entries, targets, lambda draft: draft.resources(problem.planning.objective), tick
    )


def _by_gpu(found: Sequence[Candidate]) -> dict[str, list[Candidate]]:
    kinds: dict[str, list[Candidate]] = {}
    for candidate in found:
        of_kind = kinds.setdefault(candidate.supply.gpu, [])
        # Groups of nodes with the same kind of GPU would only repeat each other's instances.
        if all(other.parallelism != candidate.parallelism for other in of_kind):
            of_kind.append(candidate)
    return kinds
