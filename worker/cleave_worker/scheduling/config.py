"""How an engine orders, chunks and admits requests, by its current role.

Set on the agent's command line (`--scheduling`), sent to the engine through the scheduling page,
and applied by the schedulers of the emulated engine and of vLLM.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TypeAlias

from cleave.policy.admission import Admission
from cleave.policy.prompt_order import PrefillOrder
from cleave.rpc.v1 import agent_pb2

Role: TypeAlias = "agent_pb2.Role.ValueType"

ROLES: dict[str, Role] = {
    "prefill": agent_pb2.ROLE_PREFILL,
    "decode": agent_pb2.ROLE_DECODE,
    "mixed": agent_pb2.ROLE_MIXED,
}
"""Role names in command lines and resources."""


class SchedulingConfigError(ValueError):
    """The configuration is invalid; one line."""


@dataclass(frozen=True, slots=True)
class RoleSchedulingConfig:
    """The scheduling configuration of one role. 0: the engine's start value, or no limit."""

    order: PrefillOrder = PrefillOrder.FCFS
    prefill_sched_batch: int = 16
    """How many of the oldest prompts SJF and LJF sort at a time, which prevents starvation."""
    max_num_seqs: int = 0
    """Most requests in a step, at most the engine's start value."""
    max_num_batched_tokens: int = 0
    """Most tokens in a step (L_m, Sarathi's chunk), at most the engine's start value."""
    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt in a step while others wait, so that these are not blocked."""
    admission: Admission = Admission.GREEDY
    preemption_limit: int = 0
    """After this many preemptions a request is preempted only after those with fewer."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < (least := int(field.name == "prefill_sched_batch")):
                raise SchedulingConfigError(f"{field.name} must be at least {least}")


DEFAULT = RoleSchedulingConfig()
"""First come first served, and every request that fits is admitted."""


def clamp_limit(configured: int, initial: int) -> int:
    """Return the configured limit, capped by the engine's `initial` one; 0: `initial`."""
    return min(configured or initial, initial)


def parse(text: str) -> dict[Role, RoleSchedulingConfig]:
    """Parse {"prefill": {"order": "sjf", ...}, ...}. Raises SchedulingConfigError."""
    try:
        document = json.loads(text)
    except ValueError:
        raise SchedulingConfigError("is not JSON") from None
    if not isinstance(document, dict):
        raise SchedulingConfigError("is not a JSON object with a role for each name")
    configs: dict[Role, RoleSchedulingConfig] = {}
    for role, values in document.items():
        if role not in ROLES or not isinstance(values, dict):
            fault = f"{role}: must be one of {', '.join(ROLES)}, with an object"
            raise SchedulingConfigError(fault)
        configs[ROLES[role]] = _parse_role(role, values)
    return configs


def _parse_role(role: str, values: Mapping[str, object]) -> RoleSchedulingConfig:
    names = {field.name for field in fields(RoleSchedulingConfig)}
    settings: dict[str, int] = {}
    for name, value in values.items():
        if name not in names:
            fault = f"unknown; must be one of {', '.join(sorted(names))}"
            raise SchedulingConfigError(f"{role}.{name}: {fault}")
        if choices := {"order": PrefillOrder, "admission": Admission}.get(name):
            by_name = {choice.name.lower().replace("_", "-"): choice for choice in choices}
            if value not in by_name:
                raise SchedulingConfigError(f"{role}.{name}: must be one of {', '.join(by_name)}")
            settings[name] = by_name[str(value)]
        elif type(value) is not int:
            raise SchedulingConfigError(f"{role}.{name}: must be a whole number")
        else:
            settings[name] = value
    try:
        return RoleSchedulingConfig(**settings)  # type: ignore[arg-type]
    except SchedulingConfigError as error:
        raise SchedulingConfigError(f"{role}.{error}") from None
