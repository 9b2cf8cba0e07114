"""Queues and batches of requests: links between records, heaps in rows of an array. Compiled.

A request is in at most one queue or batch at a time, so one set of links serves all of them.
"""

import math

from cleave.perf.timing import interpolate_table
from cleave.policy.prompt_order import HANDOFF_SHARE, PrefillOrder, is_late, sort_prompts
from cleave.simulator.kv_blocks import fits_instance
from cleave.simulator.prefix_caches import find_cached_prefix, has_caches
from cleave.simulator.record_access import (
    get_heap_key,
    get_instance,
    get_phase,
    get_points,
    get_prompt,
    get_queue,
    get_request,
    get_scratch,
    get_slot,
)
from cleave.simulator.records import DECODE, HANDOFFS, NONE, PREFILL, PROMPTS, Record, State


def push(state: State, number: int, r: int) -> None:
    """Append request `r` to queue `number`, before those that are late (`PrefillOrder.IN_TIME`)."""
    queue = get_queue(state, number)
    if number < state.num_instances and get_instance(state, number).late > 0:
        inst = get_instance(state, number)
        if inst.last_in_time == NONE:
            get_request(state, r).next = queue.head
            queue.head = r
        else:
            get_request(state, r).next = get_request(state, inst.last_in_time).next
            get_request(state, inst.last_in_time).next = r
        inst.last_in_time = r
        queue.size += 1
        return
    get_request(state, r).next = NONE
    if queue.size == 0:
        queue.head = r
    else:
        get_request(state, queue.tail).next = r
    queue.tail = r
    queue.size += 1


def push_front(state: State, i: int, r: int) -> None:
    """Put request `r` at the head of the queue of instance `i`."""
    queue = get_queue(state, i)
    get_request(state, r).next = queue.head if queue.size else NONE
    queue.head = r
    if queue.size == 0:
        queue.tail = r
    queue.size += 1
    inst = get_instance(state, i)
    inst.window += 1
    if inst.late > 0 and inst.last_in_time == NONE:
        inst.last_in_time = r


def pop(state: State, number: int) -> int:
    """Remove the first request of queue `number`, which must not be empty; return its row."""
    queue = get_queue(state, number)
    r = queue.head
    queue.head = get_request(state, r).next
    queue.size -= 1
    if number < state.num_instances:
        inst = get_instance(state, number)
        inst.window = max(inst.window - 1, 0)
        inst.late = min(inst.late, queue.size)
        if inst.last_in_time == r:
            inst.last_in_time = NONE
    return r


def pop_waiting(state: State, i: int, queue: int) -> None:
    """Remove the first request of a queue; from a central queue it is assigned to instance `i`."""
    request = get_request(state, pop(state, queue))
    if queue < 2 * state.num_instances:
        return
    if get_instance(state, i).role == PREFILL:
        request.prefill = i
    else:
        request.decode = i
    # Another instance may have room for the new head of the queue.
    handoffs = 2 * state.num_instances + 1
    if get_queue(state, queue).size > 0:
        state.offered |= HANDOFFS if queue == handoffs else PROMPTS
    elif get_queue(state, handoffs + 1).size > 0:
        # Mixed instances take prompts once no handoffs wait.
        state.offered |= PROMPTS


def push_loaded(state: State, i: int, r: int) -> None:
    """Queue request `r`, whose KV has arrived on instance `i`, behind those whose pull began before
    its own, as in vLLM."""
    queue, request = get_queue(state, state.num_instances + i), get_request(state, r)
    before, other = NONE, queue.head if queue.size else NONE
    while other != NONE and get_request(state, other).pull_order < request.pull_order:
        before, other = other, get_request(state, other).next
    request.next = other
    if before == NONE:
        queue.head = r
    else:
        get_request(state, before).next = r
    queue.size += 1


def pop_loaded(state: State, i: int) -> int:
    """Remove the first request from that queue whose KV had arrived when the next iteration was
    scheduled; NONE: there is none."""
    queue, inst = get_queue(state, state.num_instances + i), get_instance(state, i)
    before, r = NONE, queue.head if queue.size else NONE
    while r != NONE and get_request(state, r).queued > inst.scheduled:
        before, r = r, get_request(state, r).next
    if r == NONE:
        return NONE
    if before == NONE:
        queue.head = get_request(state, r).next
    else:
        get_request(state, before).next = get_request(state, r).next
    queue.size -= 1
    return r


def find_waiting(state: State, i: int) -> int:
    """The queue whose head instance `i` takes next, in the engine's order; NONE when no request
    waits for it."""
    queue = find_queue(state, i)
    if queue != i:
        return queue
    inst = get_instance(state, i)
    if inst.order == PrefillOrder.IN_TIME:
        _defer_late(state, i)
    elif is_unsorted(inst):
        _sort_prompts(state, i)
    return i


def find_queue(state: State, i: int) -> int:
    """The queue that instance `i` takes its next request from; NONE when no request waits."""
    num_instances = state.num_instances
    if get_queue(state, i).size > 0:
        return i
    handoffs, prompts = 2 * num_instances + 1, 2 * num_instances + 2
    role = get_instance(state, i).role
    if role != PREFILL and _is_head_servable(state, i, handoffs):
        return handoffs
    if role != DECODE and _is_head_servable(state, i, prompts):
        return prompts
    return NONE


def is_unsorted(inst: Record) -> bool:
    """Whether an engine will sort its queue before it takes the next request."""
    is_sorted = inst.order == PrefillOrder.SJF or inst.order == PrefillOrder.LJF
    return is_sorted and inst.window == 0 and inst.role != DECODE


def has_waiting_requests(state: State, i: int) -> bool:
    """Whether requests wait at instance `i` or in a central queue."""
    central = 2 * state.num_instances + 1
    waiting: int = get_queue(state, i).size
    return waiting + get_queue(state, central).size + get_queue(state, central + 1).size > 0


def _is_head_servable(state: State, i: int, number: int) -> bool:
    """Whether instance `i` could serve the head of a central queue."""
    queue = get_queue(state, number)
    return queue.size > 0 and fits_instance(state, i, queue.head)


def _defer_late(state: State, i: int) -> None:
    """Move requests at the head of an instance's queue that are late behind all others."""
    queue, inst = get_queue(state, i), get_instance(state, i)
    while inst.late < queue.size and _is_late(state, i, queue.head):
        r = queue.head
        if inst.late == 0:
            inst.last_in_time = queue.tail
        if inst.last_in_time == r:
            inst.last_in_time = NONE
        inst.late += 1
        if queue.size > 1:
            queue.head = get_request(state, r).next
            get_request(state, queue.tail).next = r
            get_request(state, r).next = NONE
            queue.tail = r


def _is_late(state: State, i: int, r: int) -> bool:
    """Whether a waiting request misses its target; not if its client has a first token."""
    inst, request = get_instance(state, i), get_request(state, r)
    if not math.isnan(request.first_token):
        return False
    own_ms = inst.tpot_ms if request.is_pulled else predict_prompt_ms(state, i, r)
    left_ms = inst.ttft_ms - (state.now - request.arrival)
    if inst.role == PREFILL:
        left_ms -= HANDOFF_SHARE * inst.ttft_ms
    return is_late(left_ms, own_ms)


def predict_prompt_ms(state: State, i: int, r: int) -> float:
    """ms of the iterations that compute what instance `i` has not cached of a prompt; 0 if it comes
    from elsewhere, or a part of it that is not known yet."""
    inst, request = get_instance(state, i), get_request(state, r)
    if request.is_pulled:
        return 0.0
    tokens = request.to_compute
    if has_caches() and get_prompt(state, r).source != NONE:
        return 0.0
    tokens -= find_cached_prefix(state, i, r)
    chunk = min(tokens, inst.max_tokens)
    points = get_points(state, inst.prompt_table, inst.prompt_points)
    ms = interpolate_table(inst.prompt_step, points, float(chunk)) * tokens / chunk
    squares = float(request.to_compute) ** 2 - float(request.to_compute - tokens) ** 2
    return ms + inst.prompt_square * squares


def _sort_prompts(state: State, i: int) -> None:
    """Sort the next PrefillSchedBatch of an instance's waiting prompts."""
    queue, inst = get_queue(state, i), get_instance(state, i)
    count = min(inst.sched_batch, queue.size)
    numbers, tokens = get_scratch(state, 0, count), get_scratch(state, count, count)
    r = queue.head
    for index in range(count):
        numbers[index] = r
        tokens[index] = get_request(state, r).to_compute
        r = get_request(state, r).next
    rest = r if count < queue.size else NONE
    sort_prompts(numbers, tokens, inst.order)
    queue.head = numbers[0]
    for index in range(count - 1):
        get_request(state, numbers[index]).next = numbers[index + 1]
    get_request(state, numbers[count - 1]).next = rest
    if rest == NONE:
        queue.tail = numbers[count - 1]
    inst.window = count


def add_member(state: State, i: int, s: int, r: int) -> None:
    """Request `r`, which is in the list of the members of slot `s`, decodes from its next decode
    iteration on."""
    slot, request = get_slot(state, s), get_request(state, r)
    request.end_step = slot.steps + request.output - request.generated
    request.next = slot.fresh
    slot.fresh = r
    push_key(state, s, slot.batch, request.end_step << 32 | r)
    slot.batch += 1
    slot.context += request.prompt + request.generated
    get_phase(state, s * state.max_block + find_phase(state, i, r)).value += 1


def link_as_youngest(state: State, s: int, r: int) -> None:
    """Append request `r` to the list of the members of slot `s`."""
    slot, request = get_slot(state, s), get_request(state, r)
    request.older = slot.youngest
    request.younger = NONE
    if slot.youngest == NONE:
        slot.oldest = r
    else:
        get_request(state, slot.youngest).younger = r
    slot.youngest = r


def drop_member_link(state: State, s: int, r: int) -> None:
    """Remove request `r` from that list."""
    slot, request = get_slot(state, s), get_request(state, r)
    if request.older == NONE:
        slot.oldest = request.younger
    else:
        get_request(state, request.older).younger = request.younger
    if request.younger == NONE:
        slot.youngest = request.older
    else:
        get_request(state, request.younger).older = request.older


def remove_member(state: State, i: int, s: int, r: int) -> int:
    """Count a member, already removed from the heap, no longer; return its KV tokens. It stays in
    the list of members until its blocks are free."""
    slot, request = get_slot(state, s), get_request(state, r)
    context = request.prompt + request.output - (request.end_step - slot.steps)
    slot.batch -= 1
    slot.context -= context
    get_phase(state, s * state.max_block + find_phase(state, i, r)).value -= 1
    return context - 1


def find_phase(state: State, i: int, r: int) -> int:
    """Slot steps, modulo the block size, before which a member needs another block."""
    request = get_request(state, r)
    return (request.end_step + 1 - request.prompt - request.output) % get_instance(state, i).block


def push_key(state: State, s: int, size: int, key: int) -> None:
    """Add a key to the heap of slot `s`, which has `size` keys."""
    top = s * state.heap_size
    at = size
    while at > 0:
        parent = get_heap_key(state, top + ((at - 1) >> 1)).value
        if parent <= key:
            break
        get_heap_key(state, top + at).value = parent
        at = (at - 1) >> 1
    get_heap_key(state, top + at).value = key


def remove_key(state: State, s: int, size: int, removed: int) -> None:
    """Remove the key `removed` from the heap of slot `s`, which has `size` keys."""
    top = s * state.heap_size
    at = 0
    while get_heap_key(state, top + at).value != removed:
        at += 1
    last = size - 1
    key = get_heap_key(state, top + last).value
    while at > 0 and get_heap_key(state, top + ((at - 1) >> 1)).value > key:
        get_heap_key(state, top + at).value = get_heap_key(state, top + ((at - 1) >> 1)).value
        at = (at - 1) >> 1
    while 2 * at + 1 < last:
        child = top + 2 * at + 1
        if (
            child + 1 < top + last
            and get_heap_key(state, child + 1).value < get_heap_key(state, child).value
        ):
            child += 1
        if get_heap_key(state, child).value >= key:
            break
        get_heap_key(state, top + at).value = get_heap_key(state, child).value
        at = child - top
    get_heap_key(state, top + at).value = key
