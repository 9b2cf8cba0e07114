"""Variants of a placement with other step limits (batch size and tokens), coarse to fine.

Vidur, section 7.3, tries batch sizes and chunk sizes for every parallelism; here they are tried for
the best parallelism only. DistServe's prefill instances keep L_m (section 4.3).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from cleave.api.role import Role
from cleave.planner.problem import Problem
from cleave.planner.search import ranking
from cleave.planner.search.candidate_placement import CandidatePlacement, InstanceGroup, build_cell
from cleave.planner.search.candidates import PlannedInstance
from cleave.planner.search.context import SearchContext
from cleave.planner.search.ranking import RankedPlacement
from cleave.simulator.fleet import Batching, SimulatedFleet

NUM_SEQS = (64, 128, 256, 512, 1024)
"""Requests per step and pipeline stage."""
NUM_BATCHED_TOKENS = (512, 1024, 2048, 4096, 8192)
"""Tokens per step: Sarathi's chunk size, vLLM's token budget."""


def choose_refined(
    search: SearchContext,
    coarse: Sequence[CandidatePlacement],
    lay_out: Callable[[Problem, CandidatePlacement], SimulatedFleet] = build_cell,
) -> RankedPlacement | None:
    """The best of `coarse` by goodput per resource, then of that one and its variants."""
    first = ranking.find_best(search, ranking.bound_placements(search, coarse, lay_out))
    if first is None:
        return None
    finer = [first.placement, *list_variants(first.placement)]
    return ranking.find_best(search, ranking.bound_placements(search, finer, lay_out)) or first


def list_variants(placement: CandidatePlacement) -> list[CandidatePlacement]:
    """The placement with the limits of one group changed, one variant per change."""
    return [
        replace(placement, groups=tuple(changed if g is group else g for g in placement.groups))
        for group in placement.groups
        for changed in (replace(group, instance=instance) for instance in _list_limits(group))
        if changed != group
    ]


def _list_limits(group: InstanceGroup) -> list[PlannedInstance]:
    instance = group.instance
    stages = instance.candidate.parallelism.pipeline
    seqs = [each * stages for each in NUM_SEQS]
    match group.role:
        case Role.PREFILL if instance.batching is not Batching.VLLM:
            return []
        case Role.PREFILL:
            return [instance.with_limits(batched_tokens=n) for n in NUM_BATCHED_TOKENS]
        case Role.DECODE:
            return [instance.with_limits(each) for each in seqs]
        case Role.MIXED:
            return [
                *(instance.with_limits(each) for each in seqs),
                *(instance.with_limits(batched_tokens=each) for each in NUM_BATCHED_TOKENS),
            ]
