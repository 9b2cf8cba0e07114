"""Role flipping of a simulated fleet: once a second an instance may change its role. Compiled.

What is hard: a role decides only where new requests go. Requests that were dispatched before stay,
so all code after dispatch checks which phase of a request an instance serves, not which role it
has. And hours may lie between two requests, so checks that cannot find a change are skipped.
"""

import math

from cleave.policy.role_flipping import (
    NONE,
    compute_next_check_ms,
    count_next,
    decide,
    record_role,
)
from cleave.simulator.completion import interrupt_leap
from cleave.simulator.dispatch import update_scores
from cleave.simulator.iterations import find_running_iteration, schedule_next, sum_leap_ms
from cleave.simulator.kv_blocks import count_growth
from cleave.simulator.record_access import (
    get_instance,
    get_members,
    get_pressure_history,
    get_score,
    get_slot,
)
from cleave.simulator.records import State

CHECK_PERIOD_MS = 1_000.0


def check_flip(state: State, now: float, until: float) -> bool:
    """Apply the decision of `policy.role_flipping`; return whether a role changed. `until`: time of
    the next event, before which nothing else changes."""
    state.next_flip_check = now + CHECK_PERIOD_MS
    if state.next_flip_check == now:
        # After some 300,000 years, float64 milliseconds no longer resolve a second.
        state.next_flip_check = math.inf
    count = state.num_instances
    fleet_members = get_members(state, 0, count)
    for i in range(count):
        inst, member = get_instance(state, i), fleet_members[i]
        pending_ms = inst.waiting * inst.prompt_ms + inst.pending_prompt_tokens * inst.token_ms
        worked_ms = now - inst.head_started_ms if inst.pending_prompt_tokens > 0 else 0.0
        member["wait_ms"] = max(pending_ms - worked_ms, 0.0)
        free = inst.free
        if inst.in_flight == 1:
            slot = get_slot(state, inst.oldest)
            running = find_running_iteration(slot, now)
            # Blocks of a leap are allocated at its end.
            first = slot.steps + 1
            free -= count_growth(state, inst, inst.oldest, first, slot.steps + running)
            until = min(until, slot.begin + sum_leap_ms(slot, running))
        member["use"] = count_next(1.0 - free / inst.blocks, inst.running)
    history = get_pressure_history(state, 0, 2)
    i, role = decide(fleet_members, history, state, now)
    if i == NONE:
        # One period earlier than necessary, so that rounding cannot matter.
        earliest = min(until, compute_next_check_ms(fleet_members, history, state, now))
        skipped = (earliest // CHECK_PERIOD_MS - 1.0) * CHECK_PERIOD_MS
        state.next_flip_check = max(state.next_flip_check, skipped)
        return False
    record_role(fleet_members, i, role, now)
    state.num_flips += 1
    _change_role(state, i, role, now)
    return True


def _change_role(state: State, i: int, role: int, now: float) -> None:
    """Set the role and recompute the instance's scores, which open or close it by purpose."""
    # From its next iteration on it may sort its waiting prompts.
    interrupt_leap(state, i, now, False)
    schedule_next(state, i)
    get_instance(state, i).role = role
    count = state.num_instances
    for purpose in range(3):
        get_score(state, purpose * count + i).value = math.inf
    update_scores(state, i)
