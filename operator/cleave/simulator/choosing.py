"""The router's policies over the books of a simulation. Compiled; `routing` calls it.

What is hard: best fit has to know what every request of an instance still needs, and the router can
only guess how far each has come, from how long it decodes; so that is what is done here, though the
simulation knows better.
"""

import math

from cleave.policy.admission import find_peak
from cleave.policy.dispatch import (
    NONE,
    choose_pair,
    find_least,
    find_lightest,
    find_sampled,
    serves_whole,
)
from cleave.policy.lengths import find_left
from cleave.policy.packing import (
    find_norm,
    find_saved_ms,
    find_spare_context,
    find_spare_prompt,
    weigh_context,
)
from cleave.simulator.fleet import Dispatch
from cleave.simulator.layout import State
from cleave.simulator.memory import fits
from cleave.simulator.rows import instance_at, request_at, score_at, scores, scratch

_SHORTEST_STEP_MS = 1e-3


def choose(state: State, r: int) -> tuple[int, int]:
    """(prefill, decode) instance of a request; NONE: a phase not needed, or done by the other."""
    count = state.num_instances
    by_score = (
        state.dispatch == Dispatch.SHORTEST_WAIT
        or state.dispatch == Dispatch.LEAST_PENDING
        or state.dispatch == Dispatch.LEAST_REQUESTS
    )
    if state.has_prefill and state.has_decode and by_score:
        return choose_pair(
            scores(state, 0, count),
            scores(state, count, count),
            scores(state, 2 * count, count),
            scores(state, 3 * count, count),
        )
    first = _find_for_prompt(state) if state.has_prefill else NONE
    if not state.has_decode:
        return first, NONE
    second = _find_for_whole(state, r, 1, False)
    if not state.has_prefill:
        return NONE, second
    whole = _find_for_whole(state, r, 2, True)
    if first == NONE or second == NONE:
        return NONE, whole
    if whole != NONE and serves_whole(
        score_at(state, 3 * count + first).value,
        score_at(state, count + second).value,
        score_at(state, 3 * count + whole).value,
    ):
        return NONE, whole
    return first, second


def choose_short(state: State, r: int) -> int:
    """A decode instance that computes a short prompt itself; NONE: its prompt queue is too long."""
    count = state.num_instances
    i = find_least(scores(state, count, count))
    if i == NONE or not fits(state, i, r):
        return NONE
    tokens = instance_at(state, i).prompt_book + request_at(state, r).prompt
    first = find_least(scores(state, 0, count))
    if first != NONE and score_at(state, 3 * count + first).value < request_at(state, r).prompt:
        return NONE
    return i if tokens <= state.whole_below else NONE


def _find_for_prompt(state: State) -> int:
    """Who computes a prompt that somebody else decodes."""
    values = scores(state, 0, state.num_instances)
    if state.dispatch == Dispatch.POWER_OF_TWO:
        i, state.random = find_sampled(values, 2, state.random)
        return i
    return find_least(values)


def _find_for_whole(state: State, r: int, use: int, prompt: bool) -> int:
    """Who decodes (use 1); who does both phases (use 2, `prompt`)."""
    count = state.num_instances
    values = scores(state, use * count, count)
    if state.dispatch == Dispatch.POWER_OF_TWO:
        i, state.random = find_sampled(values, 2, state.random)
        return i
    if state.dispatch == Dispatch.LEAST_HEAVY:
        request = request_at(state, r)
        i, state.random = find_lightest(
            values,
            scores(state, 4 * count, count),
            scores(state, 5 * count, count),
            request.prompt + request.predicted,
            state.random,
        )
        return i
    if state.dispatch == Dispatch.BEST_FIT:
        return _find_best_fit(state, r, use, prompt)
    return find_least(values)


def _find_best_fit(state: State, r: int, use: int, prompt: bool) -> int:
    """The fullest that keeps constraints (b) to (e); none: the least pending of all."""
    count = state.num_instances
    request = request_at(state, r)
    need = weigh_context(request.prompt, request.predicted, state.gamma)
    best, best_norm = NONE, -1.0
    for i in range(count):
        if score_at(state, use * count + i).value == math.inf:
            continue
        inst = instance_at(state, i)
        norm = find_norm(inst.booked, inst.context_book, state.k2, state.c2)
        if norm <= best_norm:
            continue
        spare = find_spare_context(
            inst.booked, inst.context_book, state.k2, state.c2, state.c3, state.tpot, state.theta
        )
        if spare < need:
            continue
        if prompt:
            room = find_spare_prompt(inst.prompt_book, state.k1, state.c1, state.ttft)
            if room < request.prompt:
                continue
        if _keeps_running(state, i, r, prompt):
            best, best_norm = i, norm
    return best if best != NONE else find_least(scores(state, use * count, count))


def _keeps_running(state: State, i: int, r: int, prompt: bool) -> bool:
    """(d) and (e): what runs there keeps its TPOT, and its KV fits until all have ended."""
    inst, new = instance_at(state, i), request_at(state, r)
    size = inst.booked + 1
    held, left = scratch(state, 0, size), scratch(state, size, size)
    step_ms = state.k2 * inst.context_book + state.c2 * inst.booked + state.c3
    step_ms = max(step_ms, _SHORTEST_STEP_MS)
    saved_ms = math.inf
    at = 0
    other = inst.booked_first
    while other != NONE:
        request = request_at(state, other)
        made = 0
        if not math.isnan(request.decode_start):
            decoding_ms = state.now - request.decode_start
            made = request.made if request.preemptions else int(decoding_ms / step_ms)
            spare_ms = find_saved_ms(made + 1, decoding_ms, state.tpot, state.theta)
            saved_ms = min(saved_ms, spare_ms)
        held[at] = request.prompt + made
        left[at] = int(find_left(request.predicted, made))
        at += 1
        other = request.later
    room = find_spare_prompt(inst.prompt_book, state.k1, state.c1, saved_ms)
    if prompt and room < new.prompt:
        return False
    held[at] = new.prompt
    left[at] = new.predicted
    return find_peak(held, left) <= state.theta * inst.blocks * inst.block
