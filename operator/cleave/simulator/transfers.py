"""Requests that wait for room, and transfers of KV from prefill to decode instances. Compiled.

What is hard: reservations follow predicted output lengths, of which a wrong one must not make a
request wait for more room than the instance has; so predictions are capped at its capacity.
Transfers of one prefill instance may share its link, and those that end at the same time must be
completed in the order in which they began. And an engine that schedules ahead decides on an
iteration when the one before it begins, and the pulls that it admits begin then; but here an
iteration is formed when the one before is over. So when it is formed, what the one after it will
take is counted (`admit_next_pulls`).
"""

from cleave.policy.admission import (
    Admission,
    allows_prompt,
    compute_slack_ms,
    find_peak,
    limit_decode_ms,
    may_join,
)
from cleave.policy.output_length import estimate_remaining
from cleave.policy.prompt_batching import compute_chunk_size
from cleave.simulator.completion import interrupt_leap, release_sent
from cleave.simulator.fleet import Batching
from cleave.simulator.iterations import predict_decode_ms, wake_instance
from cleave.simulator.kv_blocks import change_usage, count_blocks, count_growth
from cleave.simulator.prefix_caches import (
    count_chunk_blocks,
    find_cached_prefix,
    has_caches,
    store_prompt,
    take_cached_prefix,
)
from cleave.simulator.queues import (
    find_phase,
    find_queue,
    find_waiting,
    pop_waiting,
    predict_prompt_ms,
    push_loaded,
)
from cleave.simulator.record_access import (
    get_heap_key,
    get_instance,
    get_prompt,
    get_pull,
    get_queue,
    get_request,
    get_scratch,
    get_slot,
)
from cleave.simulator.records import LEFT_OUT, NONE, PREFILL, Record, State

_ROW = 0xFFFFFFFF
"""Mask of the request in a key of a heap."""


def has_room(state: State, i: int, s: int, r: int, tokens: int, reserved: int = 0) -> bool:
    """Whether blocks are free for `tokens` of a waiting request beside those `reserved`, and
    admission accepts it."""
    inst, slot, request = get_instance(state, i), get_slot(state, s), get_request(state, r)
    need = count_blocks(inst, tokens) + reserved
    if has_caches():
        need -= get_prompt(state, r).shared
    if need > inst.free:
        return False
    if request.prefill == i:
        return True
    used = request.prompt + request.generated
    remaining = request.output - request.generated
    if inst.batching == Batching.LIGHTLLM:
        return _compute_future_peak(state, s, used, remaining) <= inst.blocks * inst.block
    if inst.admission == Admission.GREEDY:
        return True
    if inst.admission == Admission.WITHIN_TPOT:
        if inst.running + inst.pulling == 0 or request.preemptions > 0:
            return True
        return _keeps_tpot(state, i, s, r)
    free = inst.free * inst.block
    remaining = _predict_remaining(inst, r, state, request.generated)
    shortest = remaining
    if inst.admission == Admission.RESERVE_DYNAMIC and slot.batch:
        shortest = _find_shortest_remaining(state, inst, s)
    # The last token's KV is never written.
    return may_join(inst.admission, free, used, remaining - 1, slot.batch, shortest)


def _keeps_tpot(state: State, i: int, s: int, r: int) -> bool:
    """Whether the members of slot `s` meet their TPOT target if a request joins them."""
    inst, slot, new = get_instance(state, i), get_slot(state, s), get_request(state, r)
    # All blocks in use, as engines count.
    contexts = (inst.blocks - inst.free) * inst.block + new.prompt + new.generated
    decode_ms = predict_decode_ms(state, inst, slot.batch + 1, contexts)
    # The first one that waits is late only if all are.
    is_late = 0 < inst.late == get_queue(state, i).size
    alone_ms = predict_decode_ms(state, inst, 1, new.prompt + new.generated)
    if decode_ms > limit_decode_ms(alone_ms, inst.tpot_ms, is_late):
        return False
    prompt_ms = predict_prompt_ms(state, i, r)
    if prompt_ms == 0.0:
        return True
    prompt_ms += decode_ms
    limit_ms = limit_decode_ms(alone_ms, inst.tpot_ms, False)
    for index in range(slot.batch):
        member_row = get_heap_key(state, s * state.heap_size + index).value & _ROW
        member = get_request(state, member_row)
        generated = member.output - (member.end_step - slot.steps)
        # 0 on its way to its first token, which it has when the present iteration ends.
        since = state.now - member.first_token if member.first_token <= state.now else 0.0
        remaining = _predict_remaining(inst, member_row, state, generated)
        slack_ms = compute_slack_ms(generated, remaining, since, decode_ms, limit_ms)
        if not allows_prompt(slack_ms, prompt_ms, inst.tpot_ms):
            return False
    return True


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
        r = get_heap_key(state, top + index).value & _ROW
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
        r = get_heap_key(state, s * state.heap_size + index).value & _ROW
        request = get_request(state, r)
        remaining_tokens[at] = request.end_step - slot.steps - 1
        tokens[at] = request.prompt + request.output - 1 - remaining_tokens[at]
        at += 1
    return find_peak(tokens, remaining_tokens)


def admit_pull(state: State, i: int, s: int, queue: int, reserved: int, now: float) -> bool:
    """Reserve blocks for the request at the head of a queue and pull its KV; False: no room beside
    the blocks that are `reserved` for a prompt."""
    r = get_queue(state, queue).head
    inst, request = get_instance(state, i), get_request(state, r)
    cached = find_cached_prefix(state, i, r) if has_caches() else 0
    tokens = request.prompt + request.generated
    if not has_room(state, i, s, r, tokens, reserved):
        return False
    pop_waiting(state, i, queue)
    if cached:
        take_cached_prefix(state, i, r, now)
        get_prompt(state, r).pull_hit = cached
    blocks = count_blocks(inst, tokens) - cached // inst.block
    change_usage(inst, now, blocks, tokens - 1 - cached)
    _count_pull(state, inst, request)
    start_pull(state, s, r, cached, now)
    return True


def admit_whole(state: State, i: int, s: int, queue: int, tokens: int, now: float) -> bool:
    """Reserve blocks for all of the prompt at the head of a queue, of which `tokens` will arrive
    after those that are cached here; False: no room. It is computed before those that wait."""
    r = get_queue(state, queue).head
    inst, request = get_instance(state, i), get_request(state, r)
    # Searched again, because the search on the source was the latest.
    cached = find_cached_prefix(state, i, r)
    if not has_room(state, i, s, r, request.to_compute):
        return False
    pop_waiting(state, i, queue)
    take_cached(state, i, r, cached, now)
    blocks = count_blocks(inst, request.to_compute) - cached // inst.block
    change_usage(inst, now, blocks, tokens)
    _count_pull(state, inst, request)
    request.is_whole = 1
    return True


def take_cached(state: State, i: int, r: int, cached: int, now: float) -> None:
    """Start the computation of a prompt after its `cached` tokens, which the request then holds."""
    request = get_request(state, r)
    take_cached_prefix(state, i, r, now)
    request.computed = cached
    if has_caches() and request.preemptions == 0:
        get_prompt(state, r).hit = cached


def _count_pull(state: State, inst: Record, request: Record) -> None:
    """It joins after those that were admitted before it."""
    inst.pulling += 1
    state.pull_order += 1
    request.pull_order = state.pull_order


def admit_next_pulls(state: State, i: int, s: int, now: float) -> int:
    """Start the pulls for which there is room beside the iteration after the one that slot `s` has
    formed, which is scheduled now; return the blocks that they and preempted requests before them
    take. Those join in that iteration, all of their prompts: else it has no tokens left."""
    inst = get_instance(state, i)
    if inst.role == PREFILL or not _has_waiting_pull(state, i):
        return 0
    free = inst.free
    loaded = get_queue(state, state.num_instances + i).size
    tokens, blocks, reserved = _predict_next(state, i, s)
    tokens += loaded
    seats = inst.max_seqs - inst.running - loaded
    if tokens < inst.max_tokens and has_caches():
        _store_loaded(state, i)
    inst.free -= blocks
    while tokens < inst.max_tokens and seats > 0:
        queue = find_waiting(state, i)
        if queue == NONE:
            break
        r = get_queue(state, queue).head
        request = get_request(state, r)
        if request.is_pulled:
            if not admit_pull(state, i, s, queue, reserved, now):
                break
            continue
        tokens += request.to_compute - find_cached_prefix(state, i, r)
        seats -= 1
        if tokens > inst.max_tokens or not admit_whole(state, i, s, queue, 0, now):
            break
        if has_caches():
            store_prompt(state, i, r, request.to_compute)
        request.queued = now
        push_loaded(state, i, r)
    inst.free += blocks
    return int(free - inst.free)


def _has_waiting_pull(state: State, i: int) -> bool:
    """Whether the first request that waits and was not preempted is pulled."""
    queue = find_queue(state, i)
    if queue == NONE:
        return False
    r = get_queue(state, queue).head
    while r != NONE and not get_request(state, r).is_pulled and get_request(state, r).preemptions:
        r = get_request(state, r).next
    return r != NONE and get_request(state, r).is_pulled == 1


def _store_loaded(state: State, i: int) -> None:
    """What was pulled by requests that are to join next is found by others from now on."""
    queue = get_queue(state, state.num_instances + i)
    r = queue.head
    for _ in range(queue.size):
        if not get_request(state, r).is_whole:
            store_prompt(state, i, r, get_request(state, r).prompt)
        r = get_request(state, r).next


def count_reserved(state: State, i: int) -> int:
    """Blocks that no pull may take: for the rest of a partly computed prompt."""
    inst = get_instance(state, i)
    if inst.partial == NONE:
        return 0
    request = get_request(state, inst.partial)
    return count_chunk_blocks(state, inst, inst.partial, request.to_compute - request.computed)


def _predict_next(state: State, i: int, s: int) -> tuple[int, int, int]:
    """Tokens of the requests that run on in the iteration after the one that has been formed, the
    blocks that they take for it and those that are reserved beside them; as many tokens as an
    iteration may have if one is preempted, since nobody is admitted then."""
    inst = get_instance(state, i)
    tokens, blocks = _predict_members(state, i, s)
    if blocks > inst.free:
        return inst.max_tokens, 0, 0
    if inst.partial == NONE or tokens >= inst.max_tokens:
        return tokens, blocks, 0
    request = get_request(state, inst.partial)
    count = compute_chunk_size(request.to_compute - request.computed, inst.max_tokens - tokens)
    taken = count_chunk_blocks(state, inst, inst.partial, count)
    if blocks + taken <= inst.free:
        return tokens + count, blocks + taken, 0
    if request.end_step == LEFT_OUT:
        return inst.max_tokens, 0, 0
    return tokens, blocks, count_reserved(state, i)


def _predict_members(state: State, i: int, s: int) -> tuple[int, int]:
    """The same of its members and of those whose prompts end in the iteration that was formed."""
    inst, slot = get_instance(state, i), get_slot(state, s)
    tokens, blocks = 0, 0
    top = get_heap_key(state, s * state.heap_size).value >> 32
    r = slot.oldest
    if slot.left_out == 0 and (slot.batch == 0 or top > slot.steps + 1):
        tokens = slot.batch
        blocks = count_growth(state, inst, s, slot.steps + 1, slot.steps + 2)
        r = NONE
    while r != NONE:
        request = get_request(state, r)
        if request.end_step == LEFT_OUT:
            tokens += 1
            blocks += int((request.prompt + request.generated - 1) % inst.block == 0)
        elif slot.steps + 1 < request.end_step < LEFT_OUT:
            tokens += 1
            blocks += int((slot.steps + 1) % inst.block == find_phase(state, i, r))
        r = request.younger
    r = slot.first_prompt
    while r != NONE:
        request = get_request(state, r)
        if request.prefill != i and request.generated + 1 < request.output:
            tokens += 1
            blocks += int(request.to_compute % inst.block == 0)
        r = request.next
    return tokens, blocks


def start_pull(state: State, s: int, r: int, cached: int, now: float) -> None:
    """Start the transfer of request `r`, whose decode instance has reserved blocks for it. `s`: the
    slot whose next iteration is being formed; the pull may lengthen that iteration. `cached`:
    tokens that the decode instance has in its own cache; vLLM's connectors do not pull them."""
    request, slot = get_request(state, r), get_slot(state, s)
    end = now
    request.transfer_start = now
    if request.prefill != NONE:
        source = get_instance(state, request.prefill)
        tokens = -(-(request.prompt - cached) // source.block) * source.block
        token_ms = state.token
        if request.prompt >= state.overlap_from:
            token_ms = max(token_ms - state.overlapped_token, 0.0)
        if state.is_shared:
            request.transfer_start = max(now, source.link)
        end = request.transfer_start + state.latency + tokens * token_ms
        source.link = end
        if slot.pulls == 0:
            slot.pulls = state.receiver
        slot.pulls += tokens * state.receiver_token
    if end > now:
        push_pull(state, end, r)
    else:
        end_pull(state, r, now)


def end_pull(state: State, r: int, now: float) -> None:
    """The KV of request `r` has arrived: free it on the prefill instance; it may decode."""
    request = get_request(state, r)
    request.transfer_end = now
    request.is_pulled = 0
    if request.prefill != NONE:
        # Freed blocks may admit waiting requests, and after a role flip this instance may decode.
        interrupt_leap(state, request.prefill, now, True)
        release_sent(state, request.prefill, r, now)
        wake_instance(state, request.prefill, now)
    request.queued = now
    push_loaded(state, request.decode, r)


def push_pull(state: State, time: float, r: int) -> None:
    """Add the transfer of request `r`, which ends at `time`, to the heap."""
    at = state.num_pulls
    state.num_pulls += 1
    pull = get_pull(state, at)
    pull.time = time
    pull.request = r
    while at > 0 and _ends_before(state, at, (at - 1) >> 1):
        _swap_pulls(state, at, (at - 1) >> 1)
        at = (at - 1) >> 1


def pop_pull(state: State) -> int:
    """Remove the transfer that ends first from the heap; return its request."""
    first: int = get_pull(state, 0).request
    state.num_pulls -= 1
    count = state.num_pulls
    _swap_pulls(state, 0, count)
    at = 0
    while 2 * at + 1 < count:
        child = 2 * at + 1
        if child + 1 < count and _ends_before(state, child + 1, child):
            child += 1
        if not _ends_before(state, child, at):
            break
        _swap_pulls(state, child, at)
        at = child
    return first


def _ends_before(state: State, one: int, other: int) -> bool:
    """Whether one transfer ends before another; at equal times the one that started first does."""
    first, second = get_pull(state, one), get_pull(state, other)
    ends: bool = first.time < second.time
    if first.time == second.time:
        one_order = get_request(state, first.request).pull_order
        ends = one_order < get_request(state, second.request).pull_order
    return ends


def _swap_pulls(state: State, one: int, other: int) -> None:
    first, second = get_pull(state, one), get_pull(state, other)
    first.time, second.time = second.time, first.time
    first.request, second.request = second.request, first.request
