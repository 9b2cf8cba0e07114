"""Forms the next iteration of a micro-batch, by batching policy. Compiled.

`form_batch` is called between iterations, as an engine's scheduler is. What is hard: VLLM has to
schedule the same requests as the emulated engine's scheduler, in this order and under one token
budget:
1. members, of which the youngest are preempted when blocks run out; 2. the partly computed prompt;
3. requests whose KV has arrived; 4. waiting requests in order.
And reservations follow predicted output lengths, of which a wrong one must not make a request wait
for more room than the instance has; so predictions are capped at its capacity.
"""

import math

from cleave.policy.admission import (
    Admission,
    allows_prompt,
    compute_slack_ms,
    find_peak,
    limit_decode_ms,
    may_join,
)
from cleave.policy.output_length import estimate_remaining
from cleave.policy.prompt_batching import compute_chunk_size, may_join_prompts
from cleave.policy.prompt_order import PrefillOrder
from cleave.simulator.completion import interrupt_leap, preempt_ended, release_ended
from cleave.simulator.fleet import Batching
from cleave.simulator.host_memory import find_loadable
from cleave.simulator.iterations import predict_decode_ms, start_iterations
from cleave.simulator.kv_blocks import change_usage, count_blocks, count_growth
from cleave.simulator.prefix_caches import (
    evict_all,
    find_cached_prefix,
    has_caches,
    preempt_blocks,
    store_prompt,
    take_cached_prefix,
)
from cleave.simulator.prefix_pulls import find_fetchable, start_fetch, start_load
from cleave.simulator.queues import (
    add_member,
    drop_member_link,
    find_phase,
    find_queue,
    find_waiting,
    has_waiting_requests,
    is_unsorted,
    link_as_youngest,
    pop,
    pop_loaded,
    predict_prompt_ms,
    push_front,
    remove_key,
    remove_member,
)
from cleave.simulator.record_access import (
    get_heap_key,
    get_instance,
    get_prompt,
    get_queue,
    get_request,
    get_scratch,
    get_slot,
    get_stage,
)
from cleave.simulator.records import HANDOFFS, NONE, PREFILL, PROMPTS, Record, State
from cleave.simulator.transfers import start_pull

_UNLIMITED = 1 << 60
_ROW = 0xFFFFFFFF
"""Mask of the request in a key of a heap."""


def form_batch(state: State, i: int, s: int, now: float) -> bool:
    """Form and start the next iteration of slot `s` of instance `i`; False: nothing to compute."""
    inst, slot = get_instance(state, i), get_slot(state, s)
    begin = now
    if inst.stages > 1:
        begin = max(now, get_stage(state, i * state.max_stages).value)
    slot.tokens = 0
    slot.squares = 0
    slot.rows = 0
    slot.contexts = 0
    slot.first_prompt = NONE
    slot.decodes = 0
    slot.pulls = 0.0
    if inst.batching == Batching.VLLM:
        has_enough = _batch_chunks(state, i, s, now, begin)
    else:
        has_enough = _batch_prompts(state, i, s, now, begin)
    if release_ended(state, i, s, now) and _has_waiting(state, i):
        # It may join the next iteration.
        has_enough = False
    if slot.rows + slot.tokens == 0:
        return False
    if inst.stages > 1:
        interrupt_leap(state, i, now, True)
    is_alone = slot.first_prompt == NONE and inst.partial == NONE and has_enough
    start_iterations(state, i, s, begin, is_alone and not _may_admit_later(state, i))
    return True


def _batch_chunks(state: State, i: int, s: int, now: float, begin: float) -> bool:
    """One iteration of vLLM v1; False when a request was preempted."""
    inst, slot = get_instance(state, i), get_slot(state, s)
    has_enough = _allocate_growth(state, i, s, now)
    limit = inst.max_tokens
    if inst.partial != NONE and slot.rows < limit:
        r = inst.partial
        request = get_request(state, r)
        count = compute_chunk_size(request.to_compute - request.computed, limit - slot.rows)
        if _count_chunk_blocks(state, inst, r, count) > inst.free:
            _preempt_partial(state, i, now)
            has_enough = False
        else:
            inst.partial = NONE
            _add_chunk(state, i, s, r, count, now, begin)
    if not has_enough:
        if slot.rows + slot.tokens > 0:
            return False
        _schedule_now(state, i, s, now)
    while slot.tokens + slot.rows < limit:
        if inst.running < inst.max_seqs and (
            _join_loaded(state, i, s, now, begin) or _admit_chunk(state, i, s, now, begin)
        ):
            continue
        if slot.tokens + slot.rows > 0 or not _schedule_now(state, i, s, now):
            break
    return has_enough


def _schedule_now(state: State, i: int, s: int, now: float) -> bool:
    """Nothing could be scheduled ahead: schedule with what the last iteration frees; False: that is
    done already."""
    inst = get_instance(state, i)
    if inst.scheduled >= now:
        return False
    inst.scheduled = now
    release_ended(state, i, s, now)
    return True


def _admit_chunk(state: State, i: int, s: int, now: float, begin: float) -> bool:
    """Add the next waiting request to the iteration or start its transfer; False: no room, or it
    came after the iteration was scheduled."""
    inst, slot = get_instance(state, i), get_slot(state, s)
    queue = find_waiting(state, i)
    if queue == NONE:
        return False
    r = get_queue(state, queue).head
    request = get_request(state, r)
    if request.is_pulled:
        return _admit_pull(state, i, s, queue, now)
    if request.queued > inst.scheduled:
        return False
    cached = find_cached_prefix(state, i, r)
    if has_caches() and get_prompt(state, r).source != NONE:
        fetched = find_fetchable(state, r, cached)
        if fetched:
            if _admit_whole(state, i, s, queue, fetched, now):
                start_fetch(state, s, i, r, fetched, now)
                return True
            return False
        cached = find_cached_prefix(state, i, r)
    loaded = find_loadable(state, i, r, cached) if has_caches() and inst.host_blocks > 0 else 0
    if loaded:
        if _admit_whole(state, i, s, queue, loaded, now):
            start_load(state, i, r, loaded, now)
            return True
        return False
    # Although it takes blocks only for what it computes (vLLM's scheduler_reserve_full_isl).
    if not _has_room(state, i, s, r, request.to_compute):
        return False
    left = request.to_compute - cached
    count = compute_chunk_size(left, inst.max_tokens - slot.tokens - slot.rows)
    _pop_waiting(state, i, queue)
    _count_running(state, i)
    _take_cached(state, i, r, cached, now)
    _add_chunk(state, i, s, r, count, now, begin)
    return True


def _count_running(state: State, i: int) -> None:
    inst = get_instance(state, i)
    inst.running += 1
    inst.running_peak = max(inst.running_peak, inst.running)


def _batch_prompts(state: State, i: int, s: int, now: float, begin: float) -> bool:
    """One iteration of a policy without chunked prefill; False when a request was preempted."""
    inst, slot = get_instance(state, i), get_slot(state, s)
    policy = inst.batching
    if policy == Batching.PREFILL_FIRST or policy == Batching.LIGHTLLM:
        _admit_prompts(state, i, s, now, begin)
        if slot.tokens > 0:
            return True
    has_enough = _allocate_growth(state, i, s, now)
    if slot.rows > 0 and (policy == Batching.FASTER_TRANSFORMER or not has_enough):
        return has_enough
    while inst.running < inst.max_seqs and _join_loaded(state, i, s, now, begin):
        pass
    if policy != Batching.PREFILL_FIRST and policy != Batching.LIGHTLLM:
        _admit_prompts(state, i, s, now, begin)
        while inst.running < inst.max_seqs and _join_loaded(state, i, s, now, begin):
            pass
    return has_enough


def _admit_prompts(state: State, i: int, s: int, now: float, begin: float) -> None:
    """Add waiting prompts to the iteration, unchunked, as far as the policy allows."""
    inst, slot = get_instance(state, i), get_slot(state, s)
    limit = inst.max_tokens
    if inst.batching != Batching.PREFILL_FIRST and inst.batching != Batching.LIGHTLLM:
        limit = _UNLIMITED
    while inst.running < inst.max_seqs:
        queue = find_waiting(state, i)
        if queue == NONE:
            break
        r = get_queue(state, queue).head
        request = get_request(state, r)
        if request.is_pulled:
            if not _admit_pull(state, i, s, queue, now):
                break
            continue
        cached = find_cached_prefix(state, i, r)
        count = request.to_compute - cached
        if not may_join_prompts(slot.tokens, count, limit):
            break
        if not _has_room(state, i, s, r, request.to_compute):
            break
        _pop_waiting(state, i, queue)
        _count_running(state, i)
        _take_cached(state, i, r, cached, now)
        _add_chunk(state, i, s, r, count, now, begin)


def _admit_pull(state: State, i: int, s: int, queue: int, now: float) -> bool:
    """Reserve blocks for the request at the head of a queue and pull its KV; False: no room."""
    r = get_queue(state, queue).head
    inst, request = get_instance(state, i), get_request(state, r)
    cached = find_cached_prefix(state, i, r) if has_caches() else 0
    tokens = request.prompt + request.generated
    if not _has_room(state, i, s, r, tokens):
        return False
    _pop_waiting(state, i, queue)
    if cached:
        take_cached_prefix(state, i, r, now)
        get_prompt(state, r).pull_hit = cached
    blocks = count_blocks(inst, tokens) - cached // inst.block
    change_usage(inst, now, blocks, tokens - 1 - cached)
    _count_pull(state, inst, request)
    start_pull(state, s, r, cached, now)
    return True


def _count_pull(state: State, inst: Record, request: Record) -> None:
    inst.pulling += 1
    state.pull_order += 1
    request.pull_order = state.pull_order


def _admit_whole(state: State, i: int, s: int, queue: int, tokens: int, now: float) -> bool:
    """Reserve blocks for all of the prompt at the head of a queue, of which `tokens` will arrive
    after those that are cached here; False: no room. It is computed before those that wait."""
    r = get_queue(state, queue).head
    inst, request = get_instance(state, i), get_request(state, r)
    # Searched again, because the search on the source was the latest.
    cached = find_cached_prefix(state, i, r)
    if not _has_room(state, i, s, r, request.to_compute):
        return False
    _pop_waiting(state, i, queue)
    _take_cached(state, i, r, cached, now)
    blocks = count_blocks(inst, request.to_compute) - cached // inst.block
    change_usage(inst, now, blocks, tokens)
    _count_pull(state, inst, request)
    get_prompt(state, r).is_whole = 1
    return True


def _take_cached(state: State, i: int, r: int, cached: int, now: float) -> None:
    """Start the computation of a prompt after its `cached` tokens, which the request then holds."""
    request = get_request(state, r)
    take_cached_prefix(state, i, r, now)
    request.computed = cached
    if has_caches() and request.preemptions == 0:
        get_prompt(state, r).hit = cached


def _pop_waiting(state: State, i: int, queue: int) -> None:
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


def _join_loaded(state: State, i: int, s: int, now: float, begin: float) -> bool:
    """Add the next request whose KV has arrived to the iteration; False when there is none, or it
    came after the iteration was scheduled."""
    inst, slot = get_instance(state, i), get_slot(state, s)
    r = pop_loaded(state, i)
    if r == NONE:
        return False
    inst.pulling -= 1
    request = get_request(state, r)
    _count_running(state, i)
    if has_caches() and request.computed < request.to_compute and _computes(state, i, r):
        left = inst.max_tokens - slot.tokens - slot.rows
        count = compute_chunk_size(request.to_compute - request.computed, left)
        _add_chunk(state, i, s, r, count, now, begin)
        return True
    if has_caches():
        # What was pulled is found by others from now on, as in vLLM.
        store_prompt(state, i, r, request.prompt)
    link_as_youngest(state, s, r)
    add_member(state, i, s, r)
    slot.decodes = 1
    slot.rows += 1
    slot.contexts += request.prompt + request.generated
    return True


def _computes(state: State, i: int, r: int) -> bool:
    """Whether instance `i`, where KV of request `r` arrived, computes the rest of its prompt."""
    first = get_request(state, r).prefill
    computes: bool = first == i or (first == NONE and get_prompt(state, r).is_whole == 1)
    return computes


def _add_chunk(state: State, i: int, s: int, r: int, count: int, now: float, begin: float) -> None:
    """Add the next `count` tokens of a prompt, or of a preempted request, to the iteration."""
    inst, slot, request = get_instance(state, i), get_slot(state, s), get_request(state, r)
    change_usage(inst, now, _count_chunk_blocks(state, inst, r, count), count)
    if math.isnan(request.prefill_start):
        request.prefill_start = begin
    start = request.computed
    end = start + count
    if count == 1 and inst.batching == Batching.VLLM:
        # An engine computes a single prompt token exactly like a decoding request.
        slot.rows += 1
        slot.contexts += end
    else:
        slot.tokens += count
        slot.squares += end * end - start * start
    inst.prompt_tokens += count
    request.computed = end
    if has_caches():
        store_prompt(state, i, r, end)
    if end == request.to_compute:
        if request.prefill != i:
            # It is older than what joins later in the iteration, and decodes only after it.
            link_as_youngest(state, s, r)
            request.end_step = _UNLIMITED
        request.next = NONE
        if slot.first_prompt == NONE:
            slot.first_prompt = r
        else:
            get_request(state, slot.last_prompt).next = r
        slot.last_prompt = r
    else:
        inst.partial = r


def _count_chunk_blocks(state: State, inst: Record, r: int, count: int) -> int:
    """Additional blocks for the next `count` tokens of a prompt."""
    request = get_request(state, r)
    if has_caches() and get_prompt(state, r).is_whole:
        return 0
    if request.computed == 0:
        return count_blocks(inst, count)
    return count_blocks(inst, request.computed + count) - count_blocks(inst, request.computed)


def _allocate_growth(state: State, i: int, s: int, now: float) -> bool:
    """Allocate blocks for one more token of each member; False: members were preempted for it."""
    inst, slot = get_instance(state, i), get_slot(state, s)
    has_enough = True
    need = count_growth(state, inst, s, slot.steps, slot.steps + 1)
    while need > inst.free:
        has_enough = False
        evict_all(state, i)
        if inst.partial != NONE:
            _preempt_partial(state, i, now)
            continue
        r = slot.youngest
        if not math.isnan(get_request(state, r).end):
            preempt_ended(state, i, s, r, now)
            continue
        if slot.steps % inst.block == find_phase(state, i, r):
            need -= 1
        _preempt(state, i, s, r, now)
    if slot.batch > 0:
        slot.decodes = 1
        inst.free -= need
    slot.rows = slot.batch
    slot.contexts = slot.context
    return has_enough


def _preempt(state: State, i: int, s: int, r: int, now: float) -> None:
    """Preempt a member: free its KV and put it at the head of the queue, to be recomputed."""
    slot, request = get_slot(state, s), get_request(state, r)
    remove_key(state, s, slot.batch, request.end_step << 32 | r)
    if slot.fresh == r:
        slot.fresh = request.next
    else:
        request.last_token = slot.decoded
    tokens = remove_member(state, i, s, r)
    drop_member_link(state, s, r)
    preempt_blocks(state, i, r, tokens, now)
    request.generated = request.output - (request.end_step - slot.steps)
    _requeue(state, i, r)


def _preempt_partial(state: State, i: int, now: float) -> None:
    """Preempt the prompt that is partly computed, as `_preempt` does."""
    inst = get_instance(state, i)
    r = inst.partial
    computed = get_request(state, r).computed
    preempt_blocks(state, i, r, computed, now)
    if has_caches() and get_prompt(state, r).is_whole:
        prompt_blocks = count_blocks(inst, get_request(state, r).to_compute)
        change_usage(inst, now, count_blocks(inst, computed) - prompt_blocks, 0)
    inst.partial = NONE
    _requeue(state, i, r)


def _requeue(state: State, i: int, r: int) -> None:
    inst, request = get_instance(state, i), get_request(state, r)
    request.to_compute = request.prompt + request.generated
    request.computed = 0
    request.preemptions += 1
    if has_caches():
        get_prompt(state, r).is_whole = 0
    inst.preemptions += 1
    inst.running -= 1
    push_front(state, i, r)


def _has_room(state: State, i: int, s: int, r: int, tokens: int) -> bool:
    """Whether blocks are free for `tokens` of a waiting request, and admission accepts it."""
    inst, slot, request = get_instance(state, i), get_slot(state, s), get_request(state, r)
    need = count_blocks(inst, tokens)
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


def _may_admit_later(state: State, i: int) -> bool:
    """Whether a waiting request may join before a member ends: it came after the iteration was
    scheduled, or members make progress."""
    inst = get_instance(state, i)
    if inst.schedules_ahead and _has_late_request(state, i):
        return True
    is_fixed = inst.admission != Admission.RESERVE_DYNAMIC and inst.batching != Batching.LIGHTLLM
    # The first one becomes late and another is the first; members save time for a prompt.
    is_timed = inst.order == PrefillOrder.IN_TIME or inst.admission == Admission.WITHIN_TPOT
    if is_fixed and not is_timed:
        return False
    return has_waiting_requests(state, i)


def _has_waiting(state: State, i: int) -> bool:
    return has_waiting_requests(state, i) or get_queue(state, state.num_instances + i).size > 0


def _has_late_request(state: State, i: int) -> bool:
    """Whether a request came after the iteration was scheduled, or may have."""
    inst, loaded = get_instance(state, i), get_queue(state, state.num_instances + i)
    r = loaded.head
    for _ in range(loaded.size):
        if get_request(state, r).queued > inst.scheduled:
            return True
        r = get_request(state, r).next
    queue = find_queue(state, i)
    if queue == NONE:
        return False
    # An engine sorts its queue only when it can admit a request, so it is not sorted here.
    if queue == i and is_unsorted(inst):
        return True
    return get_request(state, get_queue(state, queue).head).queued > inst.scheduled
