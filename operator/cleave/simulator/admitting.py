"""Whether an instance has room for a waiting request. Compiled.

What is hard: reserving goes by what requests are predicted to need, and a wrong prediction must not
make one wait for more room than there is; so none counts for more than the instance can hold.
"""

from cleave.policy.admission import Admission, find_peak, may_join
from cleave.policy.lengths import find_left
from cleave.simulator.fleet import Batching
from cleave.simulator.layout import NONE, Record, State
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
    free = inst.free * inst.block
    left = _foretell(inst, r, state, request.made)
    shortest = left
    if inst.admission == Admission.RESERVE_DYNAMIC and slot.batch:
        shortest = _find_shortest(state, inst, s)
    # The last token is never written.
    return may_join(inst.admission, free, held, left - 1, slot.batch, shortest)


def _foretell(inst: Record, r: int, state: State, made: int) -> int:
    """Output still to come of a request that has made so much, as far as anybody knows."""
    request = request_at(state, r)
    most = inst.blocks * inst.block - request.prompt - made + 1
    return min(int(find_left(request.predicted, made)), most)


def _find_shortest(state: State, inst: Record, s: int) -> int:
    """Output still to come of the member that is foretold to end first."""
    slot = slot_at(state, s)
    top = s * state.heap_size
    if not state.is_foretold:
        return (key_at(state, top).value >> 32) - slot.steps
    shortest = 1 << 60
    for place in range(slot.batch):
        r = key_at(state, top + place).value & 0xFFFFFFFF
        request = request_at(state, r)
        left = request.end_step - slot.steps
        shortest = min(shortest, _foretell(inst, r, state, request.output - left))
    return shortest


def _find_future_peak(state: State, s: int, held: int, left: int) -> float:
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
