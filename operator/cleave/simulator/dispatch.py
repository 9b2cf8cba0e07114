"""Which instances take a request, with the router's own books and decisions. Compiled.

What is hard: the router counts a request from the moment it is placed, not from the moment it is
computed, so the books are kept here as `cleave.router` keeps them: prompt tokens until the prompt
is answered, prompt and output tokens of what decodes until it ends.
"""

from cleave.policy.best_fit import weigh_context
from cleave.policy.dispatch import (
    HEAVY_OUTPUT_TOKENS,
    LIGHTEST,
    TO_DECODE,
    TO_PREFILL,
    TO_WHOLE,
    weigh,
)
from cleave.policy.dispatch import score as score_instance
from cleave.policy.queue_model import add_answer, fit_line
from cleave.simulator.kv_blocks import fits
from cleave.simulator.outcome import Fate
from cleave.simulator.record_access import instance_at, request_at, score_at
from cleave.simulator.records import (
    DECODE,
    HEAVINESS,
    MIXED,
    NONE,
    PENDING_PROMPT,
    PREFILL,
    ROOM,
    State,
)
from cleave.simulator.selection import choose, choose_short


def place(state: State, r: int) -> None:
    """Choose the instances of an arriving request and enter it in their books."""
    request = request_at(state, r)
    if state.is_deferred:
        if not _fits_somewhere(state, r):
            request.fate = Fate.TOO_LONG
        return
    first, second = NONE, NONE
    if request.prompt <= state.whole_below and state.has_prefill and state.has_decode:
        second = choose_short(state, r)
    if second == NONE:
        first, second = choose(state, r)
    if (first != NONE and not fits(state, first, r)) or (
        second != NONE and not fits(state, second, r)
    ):
        request.fate = Fate.TOO_LONG
        return
    request.prefill = first
    request.decode = second
    _enter(state, r)


def _fits_somewhere(state: State, r: int) -> bool:
    """Whether some mixed instance, or a prefill and a decode instance, could serve request `r`."""
    can_prefill = not state.has_prefill
    can_decode = not state.has_decode
    for i in range(state.num_instances):
        role = instance_at(state, i).role
        if fits(state, i, r):
            can_prefill = can_prefill or role != DECODE
            can_decode = can_decode or role != PREFILL
    return can_prefill and can_decode


def _enter(state: State, r: int) -> None:
    request = request_at(state, r)
    state.turn += 1
    i = request.prefill if request.prefill != NONE else request.decode
    if state.has_prefill:
        inst = instance_at(state, i)
        if inst.prompt_book == 0:
            inst.since_ms = state.now
        inst.prompt_book += request.prompt
        inst.waiting += 1
        inst.turn = state.turn
        if request.prefill != NONE:
            inst.requests += 1
        score(state, i)
    if request.decode != NONE:
        inst = instance_at(state, request.decode)
        inst.resident_book += request.prompt + request.predicted
        inst.turn = state.turn
        inst.requests += 1
        _book(state, r)
        score(state, request.decode)


def _book(state: State, r: int) -> None:
    """Request `r` joins the list of those that its decode instance has or will have."""
    request = request_at(state, r)
    inst = instance_at(state, request.decode)
    inst.context_book += weigh_context(request.prompt, request.predicted, state.gamma)
    inst.booked += 1
    if request.predicted > HEAVY_OUTPUT_TOKENS:
        inst.heavy += 1
    request.earlier = NONE
    request.later = inst.booked_first
    if inst.booked_first != NONE:
        request_at(state, inst.booked_first).earlier = r
    inst.booked_first = r


def close_prompt(state: State, r: int) -> None:
    """The prompt of request `r` is answered."""
    if state.is_deferred:
        return
    request = request_at(state, r)
    i = request.prefill if request.prefill != NONE else request.decode
    inst = instance_at(state, i)
    inst.prompt_book -= request.prompt
    inst.waiting -= 1
    sums = add_answer(
        (
            inst.learnt_passes,
            inst.learnt_prompts,
            inst.learnt_tokens,
            inst.learnt_inverses,
            inst.learnt_ms,
            inst.learnt_rates,
            inst.learnt_squares,
            inst.learnt_last,
            inst.learnt_last_ms,
        ),
        float(request.prompt),
        state.now - inst.since_ms,
    )
    inst.since_ms = state.now
    inst.prompt_ms, inst.token_ms, inst.safe_token_ms = fit_line(sums)
    (
        inst.learnt_passes,
        inst.learnt_prompts,
        inst.learnt_tokens,
        inst.learnt_inverses,
        inst.learnt_ms,
        inst.learnt_rates,
        inst.learnt_squares,
        inst.learnt_last,
        inst.learnt_last_ms,
    ) = sums
    if request.prefill != NONE:
        inst.requests -= 1
    score(state, i)


def close_resident(state: State, r: int) -> None:
    """Request `r` has ended."""
    request = request_at(state, r)
    if state.is_deferred or request.decode == NONE:
        return
    inst = instance_at(state, request.decode)
    inst.resident_book -= request.prompt + request.predicted
    inst.context_book -= weigh_context(request.prompt, request.predicted, state.gamma)
    inst.requests -= 1
    inst.booked -= 1
    if request.predicted > HEAVY_OUTPUT_TOKENS:
        inst.heavy -= 1
    if request.earlier != NONE:
        request_at(state, request.earlier).later = request.later
    else:
        inst.booked_first = request.later
    if request.later != NONE:
        request_at(state, request.later).earlier = request.earlier
    score(state, request.decode)


def score(state: State, i: int) -> None:
    """Set what the columns show of an instance, as the router's board does."""
    inst, count = instance_at(state, i), state.num_instances
    first, total = score_instance(
        state.counts,
        inst.prompt_book,
        inst.waiting,
        inst.resident_book,
        inst.requests,
        inst.turn,
        inst,
        0.0,
        inst.role == PREFILL,
    )
    score_at(state, PENDING_PROMPT * count + i).value = inst.prompt_book
    if inst.role == PREFILL:
        score_at(state, TO_PREFILL * count + i).value = first
        return
    score_at(state, TO_DECODE * count + i).value = total
    if inst.role == MIXED:
        score_at(state, TO_WHOLE * count + i).value = total
    if state.decode_pick == LIGHTEST:
        score_at(state, ROOM * count + i).value = inst.blocks * inst.block - inst.resident_book
        score_at(state, HEAVINESS * count + i).value = weigh(inst.heavy, inst.booked - inst.heavy)
