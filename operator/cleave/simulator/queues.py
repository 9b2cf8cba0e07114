"""Queues and batches of requests: links between records, heaps in rows of an array. Compiled.

A request is in at most one queue or batch at a time, so one set of links serves all of them.
"""

from cleave.policy.prompt_order import Order, sort_prompts
from cleave.simulator.kv_blocks import fits
from cleave.simulator.record_access import (
    instance_at,
    key_at,
    phase_at,
    queue_at,
    request_at,
    scratch,
    slot_at,
)
from cleave.simulator.records import DECODE, NONE, PREFILL, State


def push(state: State, number: int, r: int) -> None:
    """Append request `r` to queue `number`."""
    queue = queue_at(state, number)
    request_at(state, r).next = NONE
    if queue.size == 0:
        queue.head = r
    else:
        request_at(state, queue.tail).next = r
    queue.tail = r
    queue.size += 1


def push_first(state: State, i: int, r: int) -> None:
    """Put request `r` at the head of the queue of instance `i`."""
    queue = queue_at(state, i)
    request_at(state, r).next = queue.head if queue.size else NONE
    queue.head = r
    if queue.size == 0:
        queue.tail = r
    queue.size += 1
    instance_at(state, i).window += 1


def pop(state: State, number: int) -> int:
    """Remove the first request of queue `number`, which must not be empty; its row."""
    queue = queue_at(state, number)
    r = queue.head
    queue.head = request_at(state, r).next
    queue.size -= 1
    if number < state.num_instances:
        inst = instance_at(state, number)
        inst.window = max(inst.window - 1, 0)
    return r


def find_waiting(state: State, i: int) -> int:
    """The queue whose head instance `i` takes next; NONE when no request waits for it."""
    num_instances = state.num_instances
    if queue_at(state, i).size > 0:
        inst = instance_at(state, i)
        if inst.order != Order.FCFS and inst.window == 0 and inst.role != DECODE:
            _sort(state, i)
        return i
    hand_offs, prompts = 2 * num_instances + 1, 2 * num_instances + 2
    role = instance_at(state, i).role
    if role != PREFILL and _is_next(state, i, hand_offs):
        return hand_offs
    if role != DECODE and _is_next(state, i, prompts):
        return prompts
    return NONE


def has_waiting(state: State, i: int) -> bool:
    """Whether requests wait at instance `i` or in a central queue."""
    central = 2 * state.num_instances + 1
    waiting: int = queue_at(state, i).size
    return waiting + queue_at(state, central).size + queue_at(state, central + 1).size > 0


def _is_next(state: State, i: int, number: int) -> bool:
    """Whether instance `i` could serve the head of a central queue."""
    return queue_at(state, number).size > 0 and fits(state, i, queue_at(state, number).head)


def _sort(state: State, i: int) -> None:
    """Sort the next PrefillSchedBatch of an instance's waiting prompts."""
    queue, inst = queue_at(state, i), instance_at(state, i)
    count = min(inst.sched_batch, queue.size)
    numbers, tokens = scratch(state, 0, count), scratch(state, count, count)
    r = queue.head
    for index in range(count):
        numbers[index] = r
        tokens[index] = request_at(state, r).todo
        r = request_at(state, r).next
    rest = r if count < queue.size else NONE
    sort_prompts(numbers, tokens, inst.order)
    queue.head = numbers[0]
    for index in range(count - 1):
        request_at(state, numbers[index]).next = numbers[index + 1]
    request_at(state, numbers[count - 1]).next = rest
    if rest == NONE:
        queue.tail = numbers[count - 1]
    inst.window = count


def add_member(state: State, i: int, s: int, r: int) -> None:
    """Request `r` decodes in slot `s` from its next decode iteration on."""
    slot, request = slot_at(state, s), request_at(state, r)
    request.end_step = slot.steps + request.output - request.made
    request.older = slot.youngest
    request.younger = NONE
    if slot.youngest == NONE:
        slot.oldest = r
    else:
        request_at(state, slot.youngest).younger = r
    slot.youngest = r
    request.next = slot.fresh
    slot.fresh = r
    heap_push(state, s, slot.batch, request.end_step << 32 | r)
    slot.batch += 1
    slot.context += request.prompt + request.made
    phase_at(state, s * state.max_block + find_phase(state, i, r)).value += 1


def remove_member(state: State, i: int, s: int, r: int) -> int:
    """Remove a member that is no longer in the heap from its slot; its number of KV tokens."""
    slot, request = slot_at(state, s), request_at(state, r)
    if request.older == NONE:
        slot.oldest = request.younger
    else:
        request_at(state, request.older).younger = request.younger
    if request.younger == NONE:
        slot.youngest = request.older
    else:
        request_at(state, request.younger).older = request.older
    context = request.prompt + request.output - (request.end_step - slot.steps)
    slot.batch -= 1
    slot.context -= context
    phase_at(state, s * state.max_block + find_phase(state, i, r)).value -= 1
    return context - 1


def find_phase(state: State, i: int, r: int) -> int:
    """Slot steps, modulo the block size, before which a member needs another block."""
    request = request_at(state, r)
    phase = request.end_step + 1 - request.prompt - request.output
    return phase % instance_at(state, i).block


def heap_push(state: State, s: int, size: int, key: int) -> None:
    """Add a key to the heap of slot `s`, which has `size`."""
    top = s * state.heap_size
    at = size
    while at > 0:
        parent = key_at(state, top + ((at - 1) >> 1)).value
        if parent <= key:
            break
        key_at(state, top + at).value = parent
        at = (at - 1) >> 1
    key_at(state, top + at).value = key


def heap_remove(state: State, s: int, size: int, gone: int) -> None:
    """Remove the key `gone` from the heap of slot `s`, which has `size`."""
    top = s * state.heap_size
    at = 0
    while key_at(state, top + at).value != gone:
        at += 1
    last = size - 1
    key = key_at(state, top + last).value
    while at > 0 and key_at(state, top + ((at - 1) >> 1)).value > key:
        key_at(state, top + at).value = key_at(state, top + ((at - 1) >> 1)).value
        at = (at - 1) >> 1
    while 2 * at + 1 < last:
        child = top + 2 * at + 1
        if child + 1 < top + last and key_at(state, child + 1).value < key_at(state, child).value:
            child += 1
        if key_at(state, child).value >= key:
            break
        key_at(state, top + at).value = key_at(state, child).value
        at = child - top
    key_at(state, top + at).value = key
