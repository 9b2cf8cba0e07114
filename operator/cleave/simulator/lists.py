"""Queues and batches of requests: links between records, heaps in rows of an array. Compiled.

What is hard: a request is in one queue or in one batch at a time, so one set of links serves all.
"""

import numpy as np

from cleave.policy.ordering import Order, sort_prompts
from cleave.simulator.layout import DECODE, NONE, PREFILL, State
from cleave.simulator.memory import fits


def push(state: State, number: int, r: int) -> None:
    """Append request `r` to queue `number`."""
    queue, requests = state.queues[number], state.requests
    requests[r].next = NONE
    if queue.size == 0:
        queue.head = r
    else:
        requests[queue.tail].next = r
    queue.tail = r
    queue.size += 1


def push_first(state: State, i: int, r: int) -> None:
    """Put request `r` before all others that wait at instance `i`."""
    queue = state.queues[i]
    state.requests[r].next = queue.head if queue.size else NONE
    queue.head = r
    if queue.size == 0:
        queue.tail = r
    queue.size += 1
    state.instances[i].window += 1


def pop(state: State, number: int) -> int:
    """Take the first request out of a queue that is not empty."""
    queue = state.queues[number]
    r = queue.head
    queue.head = state.requests[r].next
    queue.size -= 1
    if number < len(state.instances):
        inst = state.instances[number]
        inst.window = max(inst.window - 1, 0)
    return r


def find_waiting(state: State, i: int) -> int:
    """The queue whose head instance `i` takes next; NONE when nobody waits."""
    num_instances = len(state.instances)
    if state.queues[i].size > 0:
        inst = state.instances[i]
        if inst.order != Order.FCFS and inst.window == 0 and inst.role != DECODE:
            _sort(state, i)
        return i
    hand_offs, prompts = 2 * num_instances + 1, 2 * num_instances + 2
    role = state.instances[i].role
    if role != PREFILL and _is_next(state, i, hand_offs):
        return hand_offs
    if role != DECODE and _is_next(state, i, prompts):
        return prompts
    return NONE


def _is_next(state: State, i: int, number: int) -> bool:
    """Whether the first in a central queue could be served by instance `i`."""
    return state.queues[number].size > 0 and fits(state, i, state.queues[number].head)


def _sort(state: State, i: int) -> None:
    """Sort the next PrefillSchedBatch of an instance's waiting prompts."""
    queue, inst, requests = state.queues[i], state.instances[i], state.requests
    count = min(inst.sched_batch, queue.size)
    numbers = np.empty(count, np.int64)
    tokens = np.empty(count, np.int64)
    r = queue.head
    for place in range(count):
        numbers[place] = r
        tokens[place] = requests[r].todo
        r = requests[r].next
    rest = r if count < queue.size else NONE
    sort_prompts(numbers, tokens, inst.order)
    queue.head = numbers[0]
    for place in range(count - 1):
        requests[numbers[place]].next = numbers[place + 1]
    requests[numbers[count - 1]].next = rest
    if rest == NONE:
        queue.tail = numbers[count - 1]
    inst.window = count


def add_member(state: State, i: int, s: int, r: int) -> None:
    """Request `r` decodes in slot `s` from its next decode pass on."""
    slot, request = state.slots[s], state.requests[r]
    request.end_step = slot.steps + request.output - request.made
    request.older = slot.youngest
    request.younger = NONE
    if slot.youngest == NONE:
        slot.oldest = r
    else:
        state.requests[slot.youngest].younger = r
    slot.youngest = r
    request.next = slot.fresh
    slot.fresh = r
    heap_push(state, s, slot.batch, request.end_step << 32 | r)
    slot.batch += 1
    slot.context += request.prompt + request.made
    state.phases[s, find_phase(state, i, r)] += 1


def remove_member(state: State, i: int, s: int, r: int) -> int:
    """Take a member that is no longer in the heap out of its slot; the KV tokens that it holds."""
    slot, request = state.slots[s], state.requests[r]
    if request.older == NONE:
        slot.oldest = request.younger
    else:
        state.requests[request.older].younger = request.younger
    if request.younger == NONE:
        slot.youngest = request.older
    else:
        state.requests[request.younger].older = request.older
    context = request.prompt + request.output - (request.end_step - slot.steps)
    slot.batch -= 1
    slot.context -= context
    state.phases[s, find_phase(state, i, r)] -= 1
    return context - 1


def find_phase(state: State, i: int, r: int) -> int:
    """Slot steps, modulo the block size, before which a member needs another block."""
    request = state.requests[r]
    phase = request.end_step + 1 - request.prompt - request.output
    return phase % state.instances[i].block


def heap_push(state: State, s: int, size: int, key: int) -> None:
    """Add a key to the heap of slot `s`, which has `size`."""
    heap = state.heaps
    at = size
    while at > 0:
        parent = (at - 1) >> 1
        if heap[s, parent] <= key:
            break
        heap[s, at] = heap[s, parent]
        at = parent
    heap[s, at] = key


def heap_remove(state: State, s: int, size: int, at: int) -> None:
    """Remove the key at place `at` from the heap of slot `s`, which has `size`."""
    heap = state.heaps
    key = heap[s, size - 1]
    last = size - 1
    while at > 0 and heap[s, (at - 1) >> 1] > key:
        heap[s, at] = heap[s, (at - 1) >> 1]
        at = (at - 1) >> 1
    while True:
        child = 2 * at + 1
        if child >= last:
            break
        if child + 1 < last and heap[s, child + 1] < heap[s, child]:
            child += 1
        if heap[s, child] >= key:
            break
        heap[s, at] = heap[s, child]
        at = child
    heap[s, at] = key


def push_pull(state: State, time: float, r: int) -> None:
    """Note when the transfer of request `r` ends."""
    pulls, fleet = state.pulls, state.fleet[0]
    at = fleet.num_pulls
    fleet.num_pulls += 1
    while at > 0 and pulls[(at - 1) >> 1].time > time:
        pulls[at] = pulls[(at - 1) >> 1]
        at = (at - 1) >> 1
    pulls[at].time = time
    pulls[at].request = r


def pop_pull(state: State) -> int:
    """The request whose transfer ends first, which is no longer under way."""
    pulls, fleet = state.pulls, state.fleet[0]
    first = pulls[0].request
    fleet.num_pulls -= 1
    last = fleet.num_pulls
    time, r = pulls[last].time, pulls[last].request
    at = 0
    while True:
        child = 2 * at + 1
        if child >= last:
            break
        if child + 1 < last and pulls[child + 1].time < pulls[child].time:
            child += 1
        if pulls[child].time >= time:
            break
        pulls[at] = pulls[child]
        at = child
    pulls[at].time = time
    pulls[at].request = r
    return first
