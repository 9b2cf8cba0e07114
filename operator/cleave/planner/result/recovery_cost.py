"""The cost of losing a decode instance of a plan, for `cleave plan --explain`.

Plans do not provide for losses.
"""

from cleave.api.role import Role
from cleave.perf.recovery import RecoveryCost, ResidentLoad, compute_recovery_cost
from cleave.planner.plan import Plan
from cleave.planner.pool_simulation import to_candidate_placement
from cleave.planner.problem import Problem
from cleave.planner.search.candidate_placement import CandidatePlacement, InstanceGroup


def compute_loss_cost(problem: Problem, plan: Plan) -> RecoveryCost:
    """Cost of losing a decode instance at the planned rate. The prefill instances recompute its
    streams, or the mixed ones that remain."""
    placement = to_candidate_placement(problem, plan.pools, plan.algorithm, plan.cells)
    group = _get_group(placement, Role.PREFILL)
    instances = group.replicas * placement.copies * group.instance.engine.ranks
    remaining = instances if group.role is Role.PREFILL else max(instances - 1, 1)
    return compute_recovery_cost(
        group.instance.engine.timing,
        remaining,
        _build_resident_load(problem, plan, placement),
        problem.policies.kv_block_size,
    )


def _build_resident_load(
    problem: Problem, plan: Plan, placement: CandidatePlacement
) -> ResidentLoad:
    decoding = _get_group(placement, Role.DECODE)
    started_per_s = problem.rate / (decoding.replicas * placement.copies)
    output = problem.demand.mean_output_tokens
    return ResidentLoad(
        streams=started_per_s * output * plan.prediction.tpot_ms.p50 / 1e3,
        prompt_tokens=problem.demand.mean_prompt_tokens,
        generated_tokens=output / 2,
    )


def _get_group(placement: CandidatePlacement, role: Role) -> InstanceGroup:
    """The group of this role, or the mixed one."""
    groups = {group.role: group for group in placement.groups}
    return groups.get(role) or groups[Role.MIXED]
