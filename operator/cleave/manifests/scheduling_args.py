"""Scheduling arguments of a worker, by role (`--scheduling` of the agent). Pure."""

from enum import IntEnum

from cleave.api.role import Role
from cleave.api.scheduling import Scheduling
from cleave.planner.policies import ADMISSIONS, ORDERS

Terms = dict[str, str | int]


def terms(scheduling: Scheduling) -> dict[str, Terms]:
    """Return the scheduling arguments of each role, for the phases that it serves."""
    prompts: Terms = {
        "order": _name(ORDERS[scheduling.order]),
        "prefill_sched_batch": scheduling.sorted_prompts,
        "long_prefill_token_threshold": scheduling.long_prompt_tokens or 0,
    }
    decodes: Terms = {
        "admission": _name(ADMISSIONS[scheduling.admission]),
        "preemption_limit": scheduling.preemption_limit or 0,
    }
    phases = {Role.PREFILL: prompts, Role.DECODE: decodes, Role.MIXED: prompts | decodes}
    return {str(role): phases[role] | _limits(scheduling, role) for role in Role}


def _limits(scheduling: Scheduling, role: Role) -> Terms:
    limits = scheduling.limits_of(role)
    return {
        "max_num_seqs": limits.max_num_seqs or 0,
        "max_num_batched_tokens": limits.max_num_batched_tokens or 0,
    }


def _name(choice: IntEnum) -> str:
    return choice.name.lower().replace("_", "-")
