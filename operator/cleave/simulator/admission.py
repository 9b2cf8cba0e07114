"""Whether an instance has room for a waiting request. Compiled.

What is hard: reservations follow predicted output lengths, and a wrong prediction must not make a
request wait for more room than the instance has; so predictions are capped at its capacity.
"""

from cleave.policy.admission import Admission, find_peak, may_join
from cleave.policy.output_length import estimate_remaining
from cleave.simulator.fleet import Batching
from cleave.simulator.kv_blocks import count_blocks
from cleave.simulator.queues import has_waiting_requests
from cleave.simulator.record_access import (
    get_heap_key,
    get_instance,
    get_request,
    get_scratch,
    get_slot,
)
from cleave.simulator.records import NONE, Record, State


def has_room(state: State, i: int, s: int, r: int, tokens: int) -> bool:
    """Whether blocks are free for `tokens` of a waiting request, and admission accepts it."""
    inst, slot, request = get_instance(state, i), get_slot(state, s), get_request(state, r)
    if count_blocks(inst, tokens) > inst.free:
        return False
    if request.prefill == i:
        return True
    used = request.prompt + request.generated
    remaining = request.output - request.generated
    if inst.batching == Batching.LIGHTLLM:
        return _compute_future_peak(state, s, used, remaining) <= inst.blocks * inst.block
    if inst.admission == Admission.GREEDY:
        return True
    free = inst.free * inst.block
    remaining = _predict_remaining(inst, r, state, request.generated)
    shortest = remaining
    if inst.admission == Admission.RESERVE_DYNAMIC and slot.batch:
        shortest = _find_shortest_remaining(state, inst, s)
    # The last token's KV is never written.
    return may_join(inst.admission, free, used, remaining - 1, slot.batch, shortest)


def _predict_remaining(inst: Record, r: int, state: State, generated: int) -> int:
    """Predicted remaining output tokens of a request that has generated `generated` tokens."""
    request = get_request(state, r)
    limit = inst.blocks * inst.block - request.prompt - generated + 1
    return min(int(estimate_remaining(request.predicted, generated)), limit)


def _find_shortest_remaining(state: State, inst: Record, s: int) -> int:
    """Predicted remaining output tokens of the member of slot `s` that ends first."""
    slot = get_slot(state, s)
    top = s * state.heap_size
    if not state.is_predicted:
        return (get_heap_key(state, top).value >> 32) - slot.steps
    shortest = 1 << 60
    for index in range(slot.batch):
        r = get_heap_key(state, top + index).value & 0xFFFFFFFF
        request = get_request(state, r)
        remaining = request.end_step - slot.steps
        shortest = min(shortest, _predict_remaining(inst, r, state, request.output - remaining))
    return shortest


def _compute_future_peak(state: State, s: int, used: int, remaining: int) -> float:
    """Peak of the KV tokens of the slot's members and a new request, until all have ended."""
    slot = get_slot(state, s)
    size = slot.batch + 1
    r = slot.first_prompt
    while r != NONE:
        size += 1
        r = get_request(state, r).next
    tokens, remaining_tokens = get_scratch(state, 0, size), get_scratch(state, size, size)
    tokens[0] = used
    remaining_tokens[0] = remaining - 1
    at = 1
    r = slot.first_prompt
    while r != NONE:
        request = get_request(state, r)
        tokens[at] = request.prompt + request.generated
        remaining_tokens[at] = request.output - request.generated - 1
        r = request.next
        at += 1
    for index in range(slot.batch):
        request = get_request(
            state, get_heap_key(state, s * state.heap_size + index).value & 0xFFFFFFFF
        )
        remaining_tokens[at] = request.end_step - slot.steps - 1
        tokens[at] = request.prompt + request.output - 1 - remaining_tokens[at]
        at += 1
    return find_peak(tokens, remaining_tokens)


def may_admit_later(state: State, i: int) -> bool:
    """Whether a waiting request may be admitted later merely because members make progress."""
    inst = get_instance(state, i)
    if inst.admission != Admission.RESERVE_DYNAMIC and inst.batching != Batching.LIGHTLLM:
        return False
    return has_waiting_requests(state, i)
