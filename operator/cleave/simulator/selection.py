"""Supplies the books of a simulation to `policy`, which picks instances. Compiled, for `dispatch`.

What is hard: best fit has to know what every request of an instance still needs, and the router can
only guess how far each has come, from how long it decodes; so that is what is done here, though the
simulation knows better.
"""

import math

from cleave.policy.admission import sort_by_left
from cleave.policy.best_fit import (
    find_best_fit,
    find_saved_ms,
    keeps_running,
    measure_fullness,
    weigh_context,
)
from cleave.policy.dispatch import (
    FULLEST,
    NONE,
    TO_DECODE,
    TO_PREFILL,
    TO_WHOLE,
    Scores,
    choose_least_pair,
    choose_pair,
    computes_short,
    find_least,
    find_slot,
)
from cleave.policy.output_length import guess_progress
from cleave.simulator.record_access import amounts, instance_at, request_at, scores
from cleave.simulator.records import FULLNESS, HEAVINESS, PENDING_PROMPT, ROOM, State


def choose(state: State, r: int) -> tuple[int, int]:
    """(prefill, decode) instance of a request; NONE: a phase not needed, or done by the other."""
    count = state.num_instances
    if state.has_prefill and state.has_decode:
        decode = scores(state, TO_DECODE * count, count)
        pending_prompt = scores(state, PENDING_PROMPT * count, count)
        if state.is_by_score:
            prefill = scores(state, TO_PREFILL * count, count)
            mixed = scores(state, TO_WHOLE * count, count)
            return choose_least_pair(prefill, decode, mixed, pending_prompt)
        return choose_pair(state, r, decode, pending_prompt)
    if state.has_prefill:
        return find(state, TO_PREFILL, r, NONE), NONE
    return NONE, find(state, TO_DECODE, r, NONE)


def choose_short(state: State, r: int) -> int:
    """A decode instance that computes a short prompt itself; NONE: none does."""
    count = state.num_instances
    i = _find_in(state, scores(state, TO_DECODE * count, count), TO_WHOLE, r)
    if i == NONE:
        return NONE
    first = find_least(scores(state, TO_PREFILL * count, count))
    queue = instance_at(state, first).prompt_book if first != NONE else math.inf
    pending = instance_at(state, i).prompt_book
    is_short = computes_short(request_at(state, r).prompt, pending, queue, state.whole_below)
    return i if is_short else NONE


def find(state: State, purpose: int, r: int, _: int) -> int:
    """The slot for a purpose; stands for `policy.dispatch.find_for`."""
    count = state.num_instances
    return _find_in(state, scores(state, purpose * count, count), purpose, r)


def _find_in(state: State, values: Scores, purpose: int, r: int) -> int:
    """The slot that the policy's rule picks by the scores `values`."""
    count = state.num_instances
    pick = state.prefill_pick if purpose == TO_PREFILL else state.decode_pick
    request = request_at(state, r)
    if pick == FULLEST:
        slot = _find_best_fit(state, values, r, purpose == TO_WHOLE)
        if slot != NONE:
            return slot
    need = request.prompt + request.predicted
    room = scores(state, ROOM * count, count)
    heaviness = scores(state, HEAVINESS * count, count)
    slot, state.random = find_slot(pick, values, room, heaviness, need, state.random)
    return slot


def _find_best_fit(state: State, values: Scores, r: int, prefills: bool) -> int:
    count = state.num_instances
    request, fullness = request_at(state, r), scores(state, FULLNESS * count, count)
    need = weigh_context(request.prompt, request.predicted, state.gamma)
    for i in range(count):
        inst = instance_at(state, i)
        fullness[i] = measure_fullness(
            values[i],
            inst.booked,
            inst.context_book,
            inst.prompt_book,
            request.prompt,
            need,
            prefills,
            state,
            state,
        )
    return find_best_fit(fullness, state, r, prefills)


def check(state: State, i: int, r: int, prefills: bool) -> bool:
    """Whether instance `i` keeps (d) and (e); stands for `policy.best_fit.check`."""
    inst, new = instance_at(state, i), request_at(state, r)
    size = inst.booked + 1
    held, left = amounts(state, 0, size), amounts(state, size, size)
    held[0], left[0] = new.prompt, new.predicted
    step_ms = state.k2 * inst.context_book + state.c2 * inst.booked + state.c3
    saved_ms = math.inf
    at = 1
    other = inst.booked_first
    while other != NONE:
        request = request_at(state, other)
        held[at], left[at] = request.prompt, request.predicted
        if not math.isnan(request.prefill_end):
            decoding_ms = state.now - request.prefill_end
            made, left[at] = guess_progress(request.predicted, decoding_ms, step_ms)
            held[at] += made
            spare_ms = find_saved_ms(made + 1.0, decoding_ms, state.tpot_ms, state.theta)
            saved_ms = min(saved_ms, spare_ms)
        at += 1
        other = request.later
    sort_by_left(held, left)
    capacity = inst.blocks * inst.block
    return keeps_running(
        held, left, saved_ms, inst.prompt_book, new.prompt, prefills, capacity, state, state
    )
