"""Decode iterations of an instance with pipeline stages. Compiled.

What is hard: the micro-batches of a pipeline wait for each other, so their iterations do not form a
series that one leap could cover; but while no request joins or leaves, only times have to be
updated.
"""

import math

from cleave.simulator.iterations import find_busy_ms, find_pass_ms, walk
from cleave.simulator.kv_blocks import count_growth, hold
from cleave.simulator.queues import has_waiting
from cleave.simulator.record_access import instance_at, key_at, node_at, queue_at, slot_at, stage_at
from cleave.simulator.records import NONE, Record, State


def spin(state: State, i: int, until: float) -> bool:
    """Run the iterations of instance `i` that end before `until` and before the next event of any
    other instance; False: there are none."""
    inst = instance_at(state, i)
    if inst.in_flight < 2 or inst.partial != NONE or has_waiting(state, i):
        return False
    if queue_at(state, state.num_instances + i).size > 0:
        return False
    until = min(until, inst.wake, _find_rival_ms(state, i))
    s = inst.oldest
    slot = slot_at(state, s)
    iterations = 0
    while slot.finish < until and _goes_on(state, inst, slot, s):
        _turn(state, i, s)
        iterations += 1
        next_slot = slot.next
        slot.next = NONE
        slot_at(state, inst.newest).next = s
        inst.newest = s
        inst.oldest = next_slot
        s = next_slot
        slot = slot_at(state, s)
    return iterations > 0


def _goes_on(state: State, inst: Record, slot: Record, s: int) -> bool:
    """Whether the slot's next iteration has the same members, with one more token each."""
    if slot.prompts != NONE or slot.tokens > 0 or slot.rows != slot.batch or slot.batch == 0:
        return False
    if key_at(state, s * state.heap_size).value >> 32 <= slot.steps + 1:
        return False
    return count_growth(state, inst, s, slot.steps + 1, slot.steps + 2) <= inst.free


def _turn(state: State, i: int, s: int) -> None:
    """End the current iteration of slot `s` and start the next one."""
    inst, slot = instance_at(state, i), slot_at(state, s)
    batch = slot.batch
    inst.busy += find_busy_ms(inst, slot)
    inst.passes += 1
    inst.decode_passes += 1
    inst.decode_tokens += batch
    slot.steps += 1
    slot.context += batch
    slot.contexts = slot.context
    hold(inst, slot.finish, count_growth(state, inst, s, slot.steps, slot.steps + 1), batch)
    slot.begin = max(slot.finish, stage_at(state, i * state.max_stages).value)
    slot.first = find_pass_ms(state, inst, slot, slot.contexts)
    slot.finish = walk(state, i, slot)


def _find_rival_ms(state: State, i: int) -> float:
    """The time of the next event of all other instances, in ms."""
    at = state.num_leaves + i
    earliest = math.inf
    while at > 1:
        other = node_at(state, at ^ 1).value
        if other != NONE:
            earliest = min(earliest, instance_at(state, other).next)
        at //= 2
    return earliest
