"""Supplies the load of a simulation to `policy`, which picks instances. Compiled, for `dispatch`.

What is hard: best fit needs the remaining tokens of every request of an instance, and the router
can only estimate them from how long each has decoded. This module uses the same estimate, although
the simulation knows the exact number.
"""

import math

from cleave.policy.admission import sort_by_left
from cleave.policy.best_fit import (
    compute_context_weight,
    compute_saved_ms,
    find_best_fit,
    keeps_running,
    measure_fullness,
)
from cleave.policy.dispatch import (
    FULLEST,
    NONE,
    TO_DECODE,
    TO_PREFILL,
    TO_WHOLE,
    Scores,
    choose_least_pair,
    computes_short,
    find_least,
    find_slot,
    select_pair,
)
from cleave.policy.output_length import guess_progress
from cleave.simulator.record_access import get_instance, get_request, get_scores, read_amounts
from cleave.simulator.records import FULLNESS, HEAVINESS, PENDING_PROMPT, ROOM, State


def select_instances(state: State, r: int) -> tuple[int, int]:
    """(prefill, decode) instance of a request; NONE: phase not simulated, or same instance."""
    count = state.num_instances
    if state.has_prefill and state.has_decode:
        decode = get_scores(state, TO_DECODE * count, count)
        pending_prompt = get_scores(state, PENDING_PROMPT * count, count)
        if state.is_by_score:
            prefill = get_scores(state, TO_PREFILL * count, count)
            mixed = get_scores(state, TO_WHOLE * count, count)
            return choose_least_pair(prefill, decode, mixed, pending_prompt)
        return select_pair(state, r, decode, pending_prompt)
    if state.has_prefill:
        return find(state, TO_PREFILL, r, NONE), NONE
    return NONE, find(state, TO_DECODE, r, NONE)


def select_for_short_prompt(state: State, r: int) -> int:
    """A decode instance that computes a short prompt itself; NONE: none does."""
    count = state.num_instances
    i = _find_in(state, get_scores(state, TO_DECODE * count, count), TO_WHOLE, r)
    if i == NONE:
        return NONE
    first = find_least(get_scores(state, TO_PREFILL * count, count))
    queue = get_instance(state, first).pending_prompt_tokens if first != NONE else math.inf
    pending = get_instance(state, i).pending_prompt_tokens
    is_short = computes_short(
        get_request(state, r).prompt, pending, queue, state.short_prompt_tokens
    )
    return i if is_short else NONE


def find(state: State, purpose: int, r: int, _: int) -> int:
    """The slot for a purpose; replaces `policy.dispatch.find_for`."""
    count = state.num_instances
    return _find_in(state, get_scores(state, purpose * count, count), purpose, r)


def _find_in(state: State, values: Scores, purpose: int, r: int) -> int:
    """The slot that the policy's rule picks by the scores `values`."""
    count = state.num_instances
    pick = state.prefill_pick if purpose == TO_PREFILL else state.decode_pick
    request = get_request(state, r)
    if pick == FULLEST:
        slot = _find_best_fit(state, values, r, purpose == TO_WHOLE)
        if slot != NONE:
            return slot
    need = request.prompt + request.predicted
    room = get_scores(state, ROOM * count, count)
    heaviness = get_scores(state, HEAVINESS * count, count)
    slot, state.random = find_slot(pick, values, room, heaviness, need, state.random)
    return slot


def _find_best_fit(state: State, values: Scores, r: int, prefills: bool) -> int:
    count = state.num_instances
    request, fullness = get_request(state, r), get_scores(state, FULLNESS * count, count)
    need = compute_context_weight(request.prompt, request.predicted, state.gamma)
    for i in range(count):
        inst = get_instance(state, i)
        fullness[i] = measure_fullness(
            values[i],
            inst.num_assigned,
            inst.weighted_context,
            inst.pending_prompt_tokens,
            request.prompt,
            need,
            prefills,
            state,
            state,
        )
    return find_best_fit(fullness, state, r, prefills)


def check(state: State, i: int, r: int, prefills: bool) -> bool:
    """Whether instance `i` satisfies (d) and (e); replaces `policy.best_fit.check`."""
    inst, new = get_instance(state, i), get_request(state, r)
    size = inst.num_assigned + 1
    held, left = read_amounts(state, 0, size), read_amounts(state, size, size)
    held[0], left[0] = new.prompt, new.predicted
    step_ms = state.k2 * inst.weighted_context + state.c2 * inst.num_assigned + state.c3
    saved_ms = math.inf
    at = 1
    other = inst.first_assigned
    while other != NONE:
        request = get_request(state, other)
        held[at], left[at] = request.prompt, request.predicted
        if not math.isnan(request.prefill_end):
            decoding_ms = state.now - request.prefill_end
            generated, left[at] = guess_progress(request.predicted, decoding_ms, step_ms)
            held[at] += generated
            spare_ms = compute_saved_ms(generated + 1.0, decoding_ms, state.tpot_ms, state.theta)
            saved_ms = min(saved_ms, spare_ms)
        at += 1
        other = request.next_assigned
    sort_by_left(held, left)
    capacity = inst.blocks * inst.block
    return keeps_running(
        held,
        left,
        saved_ms,
        inst.pending_prompt_tokens,
        new.prompt,
        prefills,
        capacity,
        state,
        state,
    )
