"""Scheduling arguments of a worker, by role (`--scheduling` of the agent). Pure."""

from enum import IntEnum

from cleave.api.role import Role
from cleave.api.scheduling import Scheduling
from cleave.planner.problem import ADMISSIONS, ORDERS

RoleSchedulingArgs = dict[str, str | int]


def build_scheduling_args(scheduling: Scheduling) -> dict[str, RoleSchedulingArgs]:
    """Return the scheduling arguments of each role, for the phases that it serves."""
    prompts: RoleSchedulingArgs = {
        "order": _format_choice(ORDERS[scheduling.order]),
        "prefill_sched_batch": scheduling.sorted_prompts,
        "long_prefill_token_threshold": scheduling.long_prompt_tokens or 0,
    }
    decodes: RoleSchedulingArgs = {
        "admission": _format_choice(ADMISSIONS[scheduling.admission]),
        "preemption_limit": scheduling.preemption_limit or 0,
    }
    phases = {Role.PREFILL: prompts, Role.DECODE: decodes, Role.MIXED: prompts | decodes}
    return {str(role): phases[role] | _build_limits(scheduling, role) for role in Role}


def _build_limits(scheduling: Scheduling, role: Role) -> RoleSchedulingArgs:
    limits = scheduling.get_limits(role)
    return {
        "max_num_seqs": limits.max_num_seqs or 0,
        "max_num_batched_tokens": limits.max_num_batched_tokens or 0,
    }


def _format_choice(choice: IntEnum) -> str:
    return choice.name.lower().replace("_", "-")
