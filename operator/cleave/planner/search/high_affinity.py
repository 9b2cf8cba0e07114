"""Algorithm 1: prefill and decode optimised independently, then replicated.

DistServe, section 4.1, for networks on which KV transfers are cheap: any prefill instance works
with any decode instance, also with one on another GPU type.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cleave.api.role import Parallelism, Role
from cleave.planner.problem import Problem
from cleave.planner.search import ranking
from cleave.planner.search.batch_limits import choose_refined
from cleave.planner.search.candidate_placement import CandidatePlacement, InstanceGroup, build_cell
from cleave.planner.search.candidates import Candidate, build_decode, build_prefill, group_by_gpu
from cleave.planner.search.context import SearchContext
from cleave.planner.search.ranking import Choice, RankedPlacement
from cleave.planner.search.trials import Targets
from cleave.simulator.fleet import SimulatedFleet

Pair = tuple[RankedPlacement, RankedPlacement]
"""A prefill and a decode instance."""


@dataclass(frozen=True, slots=True)
class BestPhases:
    """The best instance of each phase on one GPU type; None: it never meets the phase's target."""

    gpu: str
    prefill: RankedPlacement | None
    decode: RankedPlacement | None


def optimize(
    search: SearchContext, candidates: Sequence[Candidate], choose: Choice = ranking.find_best
) -> tuple[BestPhases, ...]:
    """Algorithm 1's loops (simu_prefill, simu_decode), for each GPU type."""

    def find(of_kind: Sequence[Candidate], role: Role, alone: Targets) -> RankedPlacement | None:
        singles = [build_single(search.problem, each, role) for each in of_kind]
        return choose_refined(replace(search, targets=alone), singles, choose, _build_phase_fleet)

    return tuple(
        BestPhases(
            gpu,
            find(of_kind, Role.PREFILL, search.targets.prefill_only),
            find(of_kind, Role.DECODE, search.targets.decode_only),
        )
        for gpu, of_kind in group_by_gpu(candidates).items()
    )


def list_pairs(problem: Problem, phases: Sequence[BestPhases]) -> list[Pair]:
    """Every prefill instance with every decode instance that can pull its KV, across GPU types."""
    return [
        (prefill, decode)
        for prefill in _drop_duplicates([each.prefill for each in phases])
        for decode in _drop_duplicates([each.decode for each in phases])
        if problem.can_pair(_get_parallelism(prefill), _get_parallelism(decode))
    ]


def replicate(prefill: RankedPlacement, decode: RankedPlacement, rate: float) -> CandidatePlacement:
    """Replicas of both such that each phase serves `rate`: n = ceil(R / goodput)."""
    groups = [
        InstanceGroup(group.role, group.instance, math.ceil(rate / rated.goodput.rate))
        for rated in (prefill, decode)
        for group in rated.placement.groups
    ]
    return CandidatePlacement(tuple(groups))


def build_single(problem: Problem, candidate: Candidate, role: Role) -> CandidatePlacement:
    """A placement of one instance of one role."""
    instantiate = build_prefill if role is Role.PREFILL else build_decode
    return CandidatePlacement((InstanceGroup(role, instantiate(problem, candidate), 1),))


def _build_phase_fleet(problem: Problem, placement: CandidatePlacement) -> SimulatedFleet:
    """The fleet of one phase. In simu_decode requests arrive with a token: TPOT includes waits."""
    return replace(build_cell(problem, placement), first_token_by_decode=False)


def _get_parallelism(rated: RankedPlacement) -> Parallelism:
    return rated.placement.groups[0].instance.candidate.parallelism


def _drop_duplicates(rated: Sequence[RankedPlacement | None]) -> list[RankedPlacement]:
    return list({each.placement: each for each in rated if each is not None}.values())
