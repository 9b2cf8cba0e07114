"""The pool manager of a simulated fleet: once a second it may change an instance's role. Compiled.

What is hard: a role says where new requests go, and nothing else. What was placed before stays, so
everything behind dispatch asks which part of a request an instance has, not which role. And hours
may pass between two requests, so looks that cannot find anything new are not taken.
"""

import math

from cleave.policy.pooling import NONE, Terms, decide, find_next_ms, find_present, take
from cleave.simulator.completing import interrupt
from cleave.simulator.layout import State
from cleave.simulator.routing import score
from cleave.simulator.rows import instance_at, members, score_at, watch
from cleave.simulator.tournament import set_next

PERIOD_MS = 1_000.0


def look(state: State, now: float, until: float) -> bool:
    """Decide as `policy.pooling` does, and change the role at once; whether one was changed.

    Nothing else happens before `until`.
    """
    state.look = now + PERIOD_MS
    if state.look == now:
        # Some 300,000 years on, floats tell no second from the next.
        state.look = math.inf
    count = state.num_instances
    seen = members(state, 0, count)
    claimed, pending = 0.0, 0.0
    for i in range(count):
        claimed += instance_at(state, i).resident_book
        pending += instance_at(state, i).prompt_book
    present = find_present(claimed, pending)
    for i in range(count):
        inst, member = instance_at(state, i), seen[i]
        pending_ms = inst.waiting * inst.prompt_ms + inst.prompt_book * inst.token_ms
        worked_ms = now - inst.since_ms if inst.prompt_book > 0 else 0.0
        member["wait_ms"] = max(pending_ms - worked_ms, 0.0)
        member["use"] = present * inst.resident_book / (inst.blocks * inst.block)
    terms = Terms(
        state.wait,
        state.full,
        state.rise,
        state.calm,
        state.idle,
        state.min_prefill,
        state.min_decode,
    )
    i, role = decide(seen, watch(state, 0, 2), terms, now)
    if i == NONE:
        # One look sooner than need be, so that rounding cannot matter.
        soonest = min(until, find_next_ms(seen, watch(state, 0, 2), terms, now))
        state.look = max(state.look, (soonest // PERIOD_MS - 1.0) * PERIOD_MS)
        return False
    take(seen, i, role, now)
    state.num_flips += 1
    _flip(state, i, role, now)
    return True


def _flip(state: State, i: int, role: int, now: float) -> None:
    """Open the scores of the new role and close all others."""
    # From its next pass on it may sort what waits there.
    interrupt(state, i, now, False)
    set_next(state, i)
    instance_at(state, i).role = role
    count = state.num_instances
    for use in range(3):
        score_at(state, use * count + i).value = math.inf
    score(state, i)
