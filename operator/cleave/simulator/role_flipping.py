"""Role flipping of a simulated fleet: once a second an instance may change its role. Compiled.

What is hard: a role decides only where new requests go. Requests that were dispatched before stay,
so all code after dispatch checks which phase of a request an instance serves, not which role it
has. And hours may lie between two requests, so checks that cannot find a change are skipped.
"""

import math

from cleave.policy.role_flipping import NONE, Terms, decide, find_next_ms, find_present, take
from cleave.simulator.completion import interrupt
from cleave.simulator.dispatch import score
from cleave.simulator.event_tree import set_next
from cleave.simulator.record_access import instance_at, members, score_at, watch
from cleave.simulator.records import State

PERIOD_MS = 1_000.0


def look(state: State, now: float, until: float) -> bool:
    """Apply the decision of `policy.role_flipping` at once; whether a role was changed.

    `until`: time of the next event, before which nothing else changes.
    """
    state.look = now + PERIOD_MS
    if state.look == now:
        # After some 300,000 years, float64 milliseconds no longer resolve a second.
        state.look = math.inf
    count = state.num_instances
    fleet_members = members(state, 0, count)
    resident, pending = 0.0, 0.0
    for i in range(count):
        resident += instance_at(state, i).resident_book
        pending += instance_at(state, i).prompt_book
    present = find_present(resident, pending)
    for i in range(count):
        inst, member = instance_at(state, i), fleet_members[i]
        pending_ms = inst.waiting * inst.prompt_ms + inst.prompt_book * inst.token_ms
        worked_ms = now - inst.since_ms if inst.prompt_book > 0 else 0.0
        member["wait_ms"] = max(pending_ms - worked_ms, 0.0)
        member["use"] = present * inst.resident_book / (inst.blocks * inst.block)
    thresholds = Terms(
        state.wait,
        state.full,
        state.rise,
        state.calm,
        state.idle,
        state.min_prefill,
        state.min_decode,
    )
    i, role = decide(fleet_members, watch(state, 0, 2), thresholds, now)
    if i == NONE:
        # One period earlier than necessary, so that rounding cannot matter.
        earliest = min(until, find_next_ms(fleet_members, watch(state, 0, 2), thresholds, now))
        state.look = max(state.look, (earliest // PERIOD_MS - 1.0) * PERIOD_MS)
        return False
    take(fleet_members, i, role, now)
    state.num_flips += 1
    _flip(state, i, role, now)
    return True


def _flip(state: State, i: int, role: int, now: float) -> None:
    """Set the role and recompute the instance's scores, which open or close it for each use."""
    # From its next iteration on it may sort its waiting prompts.
    interrupt(state, i, now, False)
    set_next(state, i)
    instance_at(state, i).role = role
    count = state.num_instances
    for use in range(3):
        score_at(state, use * count + i).value = math.inf
    score(state, i)
