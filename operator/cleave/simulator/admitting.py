"""Whether an instance has room for a waiting request. Compiled."""

from cleave.policy.admission import Admission, find_peak, may_join
from cleave.simulator.fleet import Batching
from cleave.simulator.layout import NONE, State
from cleave.simulator.lists import has_waiting
from cleave.simulator.memory import count_blocks
from cleave.simulator.rows import instance_at, key_at, request_at, scratch, slot_at


def has_room(state: State, i: int, s: int, r: int, tokens: int) -> bool:
    """Whether blocks are free for `tokens` of a waiting request, and admission lets it in."""
    inst, slot, request = instance_at(state, i), slot_at(state, s), request_at(state, r)
    if count_blocks(inst, tokens) > inst.free:
        return False
    if request.prefill == i:
        return True
    held = request.prompt + request.made
    left = request.output - request.made
    if inst.batching == Batching.LIGHTLLM:
        return _find_future_peak(state, s, held, left) <= inst.blocks * inst.block
    if inst.admission == Admission.GREEDY:
        return True
    shortest = (key_at(state, s * state.heap_size).value >> 32) - slot.steps if slot.batch else left
    free = inst.free * inst.block
    # The last token is never written.
    return may_join(inst.admission, free, held, left - 1, slot.batch, shortest)


def _find_future_peak(state: State, s: int, held: int, left: int) -> int:
    """The most KV tokens that the slot's members and a new request will hold."""
    slot = slot_at(state, s)
    size = slot.batch + 1
    r = slot.prompts
    while r != NONE:
        size += 1
        r = request_at(state, r).next
    tokens, rest = scratch(state, 0, size), scratch(state, size, size)
    tokens[0] = held
    rest[0] = left - 1
    at = 1
    r = slot.prompts
    while r != NONE:
        request = request_at(state, r)
        tokens[at] = request.prompt + request.made
        rest[at] = request.output - request.made - 1
        r = request.next
        at += 1
    for place in range(slot.batch):
        request = request_at(state, key_at(state, s * state.heap_size + place).value & 0xFFFFFFFF)
        rest[at] = request.end_step - slot.steps - 1
        tokens[at] = request.prompt + request.output - 1 - rest[at]
        at += 1
    return find_peak(tokens, rest)


def may_let_in(state: State, i: int) -> bool:
    """Whether somebody waits who may join although nothing but time has passed."""
    inst = instance_at(state, i)
    if inst.admission != Admission.RESERVE_DYNAMIC and inst.batching != Batching.LIGHTLLM:
        return False
    return has_waiting(state, i)
