"""The cost of losing a decode instance of a plan, and whether KV checkpoints would pay off.

For `cleave plan --explain`; the comparison itself is in `perf.recovery`. Plans do not provide for
losses.
"""

from cleave.api.role import Role
from cleave.perf.hardware.gpu import UnknownGpuError, find_gpu
from cleave.perf.hardware.link import build_host_link
from cleave.perf.recovery import (
    CheckpointSetup,
    RecomputeSetup,
    RecoveryComparison,
    ResidentLoad,
    compare_recovery,
)
from cleave.planner.plan import Plan
from cleave.planner.pool_simulation import to_candidate_placement
from cleave.planner.problem import Problem
from cleave.planner.search.candidate_placement import CandidatePlacement, InstanceGroup


def compare_checkpoints(problem: Problem, plan: Plan) -> RecoveryComparison | None:
    """Compare recovery at the planned rate; None: GPUs in no catalogue, such as emulated ones."""
    placement = to_candidate_placement(problem, plan.pools, plan.algorithm, plan.cells)
    decoding = _get_group(placement, Role.DECODE)
    try:
        gpu = find_gpu(decoding.instance.candidate.supply.gpu)
    except UnknownGpuError:
        return None
    size = decoding.instance.candidate.parallelism
    checkpoints = CheckpointSetup(
        link=build_host_link(gpu),
        token_bytes=problem.shape.compute_kv_bytes_on_gpu(size.tensor, size.pipeline),
        gpus=size.gpus,
        block_tokens=problem.policies.kv_block_size,
        memory_gb_per_s=gpu.memory_gbps,
    )
    return compare_recovery(
        _build_recompute_source(placement),
        _build_resident_load(problem, plan, placement, decoding),
        checkpoints,
    )


def _build_resident_load(
    problem: Problem, plan: Plan, placement: CandidatePlacement, decoding: InstanceGroup
) -> ResidentLoad:
    started_per_s = problem.rate / (decoding.replicas * placement.copies)
    output = problem.demand.mean_output_tokens
    stream_s = output * plan.prediction.tpot_ms.p50 / 1e3
    return ResidentLoad(
        streams=started_per_s * stream_s,
        prompt_tokens=problem.demand.mean_prompt_tokens,
        generated_tokens=output / 2,
        started_per_s=started_per_s,
    )


def _build_recompute_source(placement: CandidatePlacement) -> RecomputeSetup:
    """The prefill instances, or the mixed ones that remain."""
    group = _get_group(placement, Role.PREFILL)
    instances = group.replicas * placement.copies * group.instance.engine.ranks
    remaining = instances if group.role is Role.PREFILL else max(instances - 1, 1)
    return RecomputeSetup(group.instance.engine.timing, group.instance.candidate.gpus, remaining)


def _get_group(placement: CandidatePlacement, role: Role) -> InstanceGroup:
    """The group of this role, or the mixed one."""
    groups = {group.role: group for group in placement.groups}
    return groups.get(role) or groups[Role.MIXED]
