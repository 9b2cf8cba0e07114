"""How an engine orders, cuts and admits work, by the role that it has now.

Stated on the agent's command line (`--scheduling`), told to the engine through the terms page, and
followed by the emulated engine's scheduler and by vLLM's (`cleave_worker.vllm.scheduler`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TypeAlias

from cleave.policy.admission import Admission
from cleave.policy.ordering import Order
from cleave.rpc.v1 import agent_pb2

Role: TypeAlias = "agent_pb2.Role.ValueType"

ROLES: dict[str, Role] = {
    "prefill": agent_pb2.ROLE_PREFILL,
    "decode": agent_pb2.ROLE_DECODE,
    "mixed": agent_pb2.ROLE_MIXED,
}
"""Role names of command lines and resources."""


class TermsError(ValueError):
    """What was stated cannot be followed; one line."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of one role. 0: what the engine was started with, or no limit."""

    order: Order = Order.FCFS
    """Of waiting prompts."""
    prefill_sched_batch: int = 16
    """The oldest prompts that SJF and LJF sort at a time, against starvation."""
    max_num_seqs: int = 0
    """Most requests in a pass, never more than the engine was started with."""
    max_num_batched_tokens: int = 0
    """Most tokens in a pass (L_m, Sarathi's chunk), never more than the engine was started with."""
    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt in a pass while others wait: a long prompt holds up no convoy."""
    admission: Admission = Admission.GREEDY
    """Of requests that decode here."""
    preemption_limit: int = 0
    """How often a request is preempted before those that were preempted less."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < (least := int(field.name == "prefill_sched_batch")):
                raise TermsError(f"{field.name} must be at least {least}")


DEFAULT = Terms()
"""First come first served, whoever fits."""


def find_limit(stated: int, started: int) -> int:
    """A limit of the terms, never above what the engine was `started` with; 0 states none."""
    return min(stated or started, started)


def parse(text: str) -> dict[Role, Terms]:
    """Terms by role from JSON: {"prefill": {"order": "sjf", ...}, ...}. Raises TermsError."""
    try:
        stated = json.loads(text)
    except ValueError:
        raise TermsError("is not JSON") from None
    if not isinstance(stated, dict):
        raise TermsError("is not a JSON object with a role for each name")
    found: dict[Role, Terms] = {}
    for role, values in stated.items():
        if role not in ROLES or not isinstance(values, dict):
            raise TermsError(f"{role}: must be one of {', '.join(ROLES)}, with an object")
        found[ROLES[role]] = _read(role, values)
    return found


def _read(role: str, values: Mapping[str, object]) -> Terms:
    known = {field.name for field in fields(Terms)}
    read: dict[str, int] = {}
    for name, value in values.items():
        if name not in known:
            raise TermsError(f"{role}.{name}: unknown; there are {', '.join(sorted(known))}")
        choices = {"order": Order, "admission": Admission}.get(name)
        if choices is not None:
            names = {each.name.lower().replace("_", "-"): each for each in choices}
            if value not in names:
                raise TermsError(f"{role}.{name}: must be one of {', '.join(names)}")
            read[name] = names[str(value)]
        elif type(value) is not int:
            raise TermsError(f"{role}.{name}: must be a whole number")
        else:
            read[name] = value
    try:
        return Terms(**read)  # type: ignore[arg-type]
    except TermsError as error:
        raise TermsError(f"{role}.{error}") from None
