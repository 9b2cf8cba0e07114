"""Algorithm 1: prefill and decode optimised independently, then replicated.

DistServe, section 4.1, for networks on which KV transfers are cheap: any prefill instance works
with any decode instance, also with one on another GPU type.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from cleave.api.role import Parallelism, Role
from cleave.planner.problem import Problem
from cleave.planner.search.batch_limits import choose_refined
from cleave.planner.search.candidate_placement import CandidatePlacement, InstanceGroup, build_cell
from cleave.planner.search.candidates import Candidate, build_decode, build_prefill, group_by_gpu
from cleave.planner.search.context import SearchContext
from cleave.planner.search.goodput import can_meet_targets
from cleave.planner.search.ranking import RankedPlacement
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


def optimize(search: SearchContext, candidates: Sequence[Candidate]) -> tuple[BestPhases, ...]:
    """Algorithm 1's loops (simu_prefill, simu_decode), for each GPU type."""

    def find(of_kind: Sequence[Candidate], role: Role, alone: Targets) -> RankedPlacement | None:
        singles = [build_single(search.problem, each, role) for each in of_kind]
        return choose_refined(replace(search, targets=alone), singles, _build_phase_fleet)

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


def list_units(
    search: SearchContext, candidates: Sequence[Candidate]
) -> Iterator[CandidatePlacement]:
    """One prefill and one decode instance of every two sizes, on any GPU types, that can pair and
    meet their phase's target alone."""
    problem = search.problem
    sizes = [each for of_kind in group_by_gpu(candidates).values() for each in of_kind]
    prefills, decodes = (
        [
            single.groups[0]
            for single in (build_single(problem, each, role) for each in sizes)
            if can_meet_targets(search.trials, build_cell(problem, single), search.targets)
        ]
        for role in (Role.PREFILL, Role.DECODE)
    )
    for prefill, decode in product(prefills, decodes):
        pair = prefill.instance.candidate, decode.instance.candidate
        if problem.can_pair(*(each.parallelism for each in pair)):
            yield CandidatePlacement((prefill, decode))


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
