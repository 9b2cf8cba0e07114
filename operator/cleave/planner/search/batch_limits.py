"""Variants of a placement with other step limits (batch size and tokens), coarse to fine.

Vidur, section 7.3, tries batch sizes and chunk sizes for every parallelism; here they are tried for
the best parallelism only. DistServe's prefill instances keep L_m (section 4.3).
"""

from collections.abc import Callable
from dataclasses import replace

from cleave.api.role import Role
from cleave.planner.search.candidate_placement import CandidatePlacement, InstanceGroup
from cleave.planner.search.candidates import PlannedInstance
from cleave.planner.search.ranking import RankedPlacement
from cleave.simulator.fleet import Batching

NUM_SEQS = (64, 128, 256, 512, 1024)
"""Requests per step and pipeline stage."""
NUM_BATCHED_TOKENS = (512, 1024, 2048, 4096, 8192)
"""Tokens per step: Sarathi's chunk size, vLLM's token budget."""

Choose = Callable[[list[CandidatePlacement]], RankedPlacement | None]


def refine(coarse: RankedPlacement | None, choose: Choose) -> RankedPlacement | None:
    """Run `choose` again, on the first choice and its variants."""
    if coarse is None:
        return None
    return choose([coarse.placement, *list_variants(coarse.placement)]) or coarse


def list_variants(placement: CandidatePlacement) -> list[CandidatePlacement]:
    """The placement with the limits of one group changed, one variant per change."""
    return [
        replace(
            placement, groups=tuple(changed if each is group else each for each in placement.groups)
        )
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
            return [
                instance.with_limits(instance.max_num_seqs, each) for each in NUM_BATCHED_TOKENS
            ]
        case Role.DECODE:
            return [instance.with_limits(each, instance.max_num_batched_tokens) for each in seqs]
        case Role.MIXED:
            return [
                instance.with_limits(num_seqs, num_tokens)
                for num_seqs in seqs
                for num_tokens in NUM_BATCHED_TOKENS
            ]
