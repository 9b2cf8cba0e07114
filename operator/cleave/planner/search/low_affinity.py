"""Algorithm 2: prefill and decode instances whose equal pipeline stages share a node.

DistServe, section 4.2, for networks too slow for KV: stages of both phases that hold the same
layers lie in one node, so that KV never leaves it. Its link there is the supply's `node_link`: the
GPUs' own link in the paper, the network between pods. Both phases have the same number of stages;
inside a node, tensor parallel sizes and counts are free. Instances of several data-parallel ranks
are not tried: their pods have no other engines.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cleave.api.role import Role
from cleave.planner.problem import Problem
from cleave.planner.search import packing
from cleave.planner.search.batch_limits import choose_refined
from cleave.planner.search.candidate_placement import CandidatePlacement, InstanceGroup
from cleave.planner.search.candidates import Candidate, build_decode, build_prefill
from cleave.planner.search.context import SearchContext
from cleave.planner.search.ranking import RankedPlacement


@dataclass(frozen=True, slots=True)
class MaxReplicas:
    """Most instances of each phase whose stages share a node; one each in the paper's search."""

    prefill: int = 1
    decode: int = 1


UNLIMITED = MaxReplicas(prefill=1 << 10, decode=1 << 10)
"""As many as a node has room for."""


def optimize(
    search: SearchContext,
    candidates: Sequence[Candidate],
    max_replicas: MaxReplicas = UNLIMITED,
) -> RankedPlacement | None:
    """The intra-node configuration with most goodput per resource; both phases are simulated
    jointly. The bound of a pair is that of its slower phase: every request passes through both."""
    configurations = list_configurations(search.problem, candidates, max_replicas)
    return choose_refined(search, configurations)


def list_configurations(
    problem: Problem, candidates: Sequence[Candidate], max_replicas: MaxReplicas
) -> list[CandidatePlacement]:
    """The paper's get_intra_node_configs, for every number of stages."""
    placements = [
        placement
        for prefill in candidates
        for decode in candidates
        if prefill.supply == decode.supply
        and prefill.parallelism.data == decode.parallelism.data == 1
        and prefill.parallelism.pipeline == decode.parallelism.pipeline
        and problem.can_pair(prefill.parallelism, decode.parallelism)
        for placement in _list_replica_counts(problem, prefill, decode, max_replicas)
    ]
    return [placement for placement in placements if packing.has_room(problem, placement)]


def _list_replica_counts(
    problem: Problem, prefill: Candidate, decode: Candidate, max_replicas: MaxReplicas
) -> list[CandidatePlacement]:
    # GPUs for one pipeline stage, limited by the node and by the GPUs that may be used.
    usable = min(problem.max_gpus, prefill.supply.max_gpus) // prefill.parallelism.pipeline
    room = min(prefill.supply.gpus_per_node, usable)
    first, second = prefill.parallelism.tensor, decode.parallelism.tensor
    return [
        CandidatePlacement(
            (
                InstanceGroup(Role.PREFILL, build_prefill(problem, prefill), n),
                InstanceGroup(Role.DECODE, build_decode(problem, decode), m),
            ),
            is_in_node=True,
        )
        for n in range(1, min(max_replicas.prefill, (room - second) // first) + 1)
        for m in range(1, min(max_replicas.decode, (room - n * first) // second) + 1)
    ]
