"""Decode iterations of an instance with pipeline stages. Compiled.

What is hard: the micro-batches of a pipeline wait for each other, so their iterations do not form a
series that one leap could cover; but while no request joins or leaves, only times have to be
updated.
"""

import math

from cleave.simulator.iterations import compute_busy_ms, predict_iteration_ms, run_stages
from cleave.simulator.kv_blocks import change_usage, count_growth
from cleave.simulator.queues import has_waiting_requests
from cleave.simulator.record_access import (
    get_heap_key,
    get_instance,
    get_node,
    get_queue,
    get_slot,
    get_stage,
)
from cleave.simulator.records import NONE, Record, State


def advance_pipeline(state: State, i: int, until: float) -> bool:
    """Run the iterations of instance `i` that end before `until` and before the next event of any
    other instance; False: there are none."""
    inst = get_instance(state, i)
    if inst.in_flight < 2 or inst.partial != NONE or has_waiting_requests(state, i):
        return False
    if get_queue(state, state.num_instances + i).size > 0:
        return False
    until = min(until, inst.wake, _find_next_other_ms(state, i))
    s = inst.oldest
    slot = get_slot(state, s)
    iterations = 0
    while slot.finish < until and _can_continue(state, inst, slot, s):
        _advance_slot(state, i, s)
        iterations += 1
        next_slot = slot.next
        slot.next = NONE
        get_slot(state, inst.newest).next = s
        inst.newest = s
        inst.oldest = next_slot
        s = next_slot
        slot = get_slot(state, s)
    return iterations > 0


def _can_continue(state: State, inst: Record, slot: Record, s: int) -> bool:
    """Whether the slot's next iteration has the same members, with one more token each."""
    if slot.first_prompt != NONE or slot.tokens > 0 or slot.rows != slot.batch or slot.batch == 0:
        return False
    if get_heap_key(state, s * state.heap_size).value >> 32 <= slot.steps + 1:
        return False
    return count_growth(state, inst, s, slot.steps + 1, slot.steps + 2) <= inst.free


def _advance_slot(state: State, i: int, s: int) -> None:
    """End the current iteration of slot `s` and start the next one."""
    inst, slot = get_instance(state, i), get_slot(state, s)
    batch = slot.batch
    inst.busy += compute_busy_ms(inst, slot)
    inst.iterations += 1
    inst.decode_iterations += 1
    inst.decode_tokens += batch
    slot.steps += 1
    slot.context += batch
    slot.contexts = slot.context
    change_usage(inst, slot.finish, count_growth(state, inst, s, slot.steps, slot.steps + 1), batch)
    slot.begin = max(slot.finish, get_stage(state, i * state.max_stages).value)
    slot.first = predict_iteration_ms(state, inst, slot, slot.contexts)
    slot.finish = run_stages(state, i, slot)


def _find_next_other_ms(state: State, i: int) -> float:
    """The time of the next event of all other instances, in ms."""
    at = state.num_leaves + i
    earliest = math.inf
    while at > 1:
        other = get_node(state, at ^ 1).value
        if other != NONE:
            earliest = min(earliest, get_instance(state, other).next)
        at //= 2
    return earliest
