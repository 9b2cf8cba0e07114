"""Forms the next iteration of a micro-batch, by batching policy. Compiled.

`form_batch` is called between iterations, as an engine's scheduler is. What is hard: VLLM has to
schedule the same requests as the emulated engine's scheduler, in this order and under one token
budget:
1. members, of which the youngest are preempted when blocks run out; 2. the partly computed prompt;
3. requests whose KV has arrived; 4. waiting requests in order.
And an engine that schedules ahead with a KV connector frees no blocks that an iteration in flight
writes to (vLLM's `defer_block_free`): it preempts nobody whose iteration runs. Instead the next
iteration leaves members out, who may then be preempted.
"""

import math

from cleave.policy.admission import Admission
from cleave.policy.prompt_batching import compute_chunk_size, may_join_prompts
from cleave.policy.prompt_order import PrefillOrder
from cleave.simulator.completion import interrupt_leap, preempt_ended, release_ended
from cleave.simulator.fleet import Batching
from cleave.simulator.host_memory import find_loadable
from cleave.simulator.iterations import start_iterations
from cleave.simulator.kv_blocks import change_usage, count_blocks, count_growth
from cleave.simulator.prefix_caches import (
    count_chunk_blocks,
    evict_all,
    find_cached_prefix,
    has_caches,
    preempt_blocks,
    store_prompt,
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
    pop_loaded,
    pop_waiting,
    push_front,
    remove_key,
    remove_member,
)
from cleave.simulator.record_access import (
    get_instance,
    get_prompt,
    get_queue,
    get_request,
    get_slot,
    get_stage,
)
from cleave.simulator.records import LEFT_OUT, NONE, Record, State
from cleave.simulator.transfers import (
    admit_next_pulls,
    admit_pull,
    admit_whole,
    count_reserved,
    has_room,
    take_cached,
)

_UNLIMITED = 1 << 60


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
    if inst.defers_free:
        inst.ahead = admit_next_pulls(state, i, s, now)
    if inst.stages > 1:
        interrupt_leap(state, i, now, True)
    is_alone = slot.first_prompt == NONE and inst.partial == NONE and has_enough
    is_alone = is_alone and slot.left_out == 0
    start_iterations(state, i, s, begin, is_alone and not _may_admit_later(state, i))
    return True


def _batch_chunks(state: State, i: int, s: int, now: float, begin: float) -> bool:
    """One iteration of vLLM v1; False when a request was preempted."""
    inst, slot = get_instance(state, i), get_slot(state, s)
    has_enough = True
    while True:
        is_again = inst.scheduled >= now
        may_admit = _add_running(state, i, s, now, begin)
        has_enough = has_enough and may_admit
        if may_admit or (is_again and slot.rows + slot.tokens == 0):
            while (
                slot.tokens + slot.rows < inst.max_tokens
                and inst.running < inst.max_seqs
                and (_join_loaded(state, i, s, now, begin) or _admit_chunk(state, i, s, now, begin))
            ):
                pass
        if is_again or slot.rows + slot.tokens > 0:
            return has_enough
        # Nothing could be scheduled ahead: schedule with what the last iteration frees.
        inst.scheduled = now
        release_ended(state, i, s, now)


def _add_running(state: State, i: int, s: int, now: float, begin: float) -> bool:
    """Add to the iteration what is running; False when a request was preempted."""
    inst, slot = get_instance(state, i), get_slot(state, s)
    has_enough = _allocate_growth(state, i, s, now)
    if inst.partial == NONE:
        return has_enough
    r = inst.partial
    request = get_request(state, r)
    left = inst.max_tokens - slot.rows
    if left == 0:
        request.end_step = LEFT_OUT
        return has_enough
    count = compute_chunk_size(request.to_compute - request.computed, left)
    if slot.left_out == 0 and count_chunk_blocks(state, inst, r, count) <= inst.free:
        inst.partial = NONE
        _add_chunk(state, i, s, r, count, now, begin)
    elif _may_preempt(inst, request, now):
        _preempt_partial(state, i, now)
        has_enough = False
    else:
        request.end_step = LEFT_OUT
    return has_enough


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
        # It was admitted when the iteration was scheduled, if it was to be.
        reserved = count_reserved(state, i)
        return inst.scheduled >= now and admit_pull(state, i, s, queue, reserved, now)
    if request.queued > inst.scheduled:
        return False
    cached = find_cached_prefix(state, i, r)
    if has_caches() and get_prompt(state, r).source != NONE:
        fetched = find_fetchable(state, r, cached)
        if fetched:
            if admit_whole(state, i, s, queue, fetched, now):
                start_fetch(state, s, i, r, fetched, now)
                return True
            return False
        cached = find_cached_prefix(state, i, r)
    loaded = find_loadable(state, i, r, cached) if has_caches() and inst.host_blocks > 0 else 0
    if loaded:
        if admit_whole(state, i, s, queue, loaded, now):
            start_load(state, i, r, loaded, now)
            return True
        return False
    # Although it takes blocks only for what it computes (vLLM's scheduler_reserve_full_isl).
    if not has_room(state, i, s, r, request.to_compute):
        return False
    left = request.to_compute - cached
    count = compute_chunk_size(left, inst.max_tokens - slot.tokens - slot.rows)
    pop_waiting(state, i, queue)
    _count_running(state, i)
    take_cached(state, i, r, cached, now)
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
            if not admit_pull(state, i, s, queue, 0, now):
                break
            continue
        cached = find_cached_prefix(state, i, r)
        count = request.to_compute - cached
        if not may_join_prompts(slot.tokens, count, limit):
            break
        if not has_room(state, i, s, r, request.to_compute):
            break
        pop_waiting(state, i, queue)
        _count_running(state, i)
        take_cached(state, i, r, cached, now)
        _add_chunk(state, i, s, r, count, now, begin)


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
    if request.is_whole:
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


def _add_chunk(state: State, i: int, s: int, r: int, count: int, now: float, begin: float) -> None:
    """Add the next `count` tokens of a prompt, or of a preempted request, to the iteration."""
    inst, slot, request = get_instance(state, i), get_slot(state, s), get_request(state, r)
    change_usage(inst, now, count_chunk_blocks(state, inst, r, count), count)
    if math.isnan(request.prefill_start):
        request.prefill_start = begin
    request.end_step = 0
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
        request.is_whole = 0
        if request.prefill != i:
            # It is older than what joins later in the iteration, and decodes only after it.
            link_as_youngest(state, s, r)
            request.end_step = LEFT_OUT + 1
        request.next = NONE
        if slot.first_prompt == NONE:
            slot.first_prompt = r
        else:
            get_request(state, slot.last_prompt).next = r
        slot.last_prompt = r
    else:
        inst.partial = r


def _may_preempt(inst: Record, request: Record, now: float) -> bool:
    """Whether the engine may free blocks of a request: with a KV connector not while an iteration
    runs that writes to them (vLLM's `defer_block_free`)."""
    return not inst.defers_free or inst.scheduled >= now or request.end_step == LEFT_OUT


def _allocate_growth(state: State, i: int, s: int, now: float) -> bool:
    """Allocate blocks for one more token of each member; False: members were preempted for it."""
    inst, slot = get_instance(state, i), get_slot(state, s)
    has_enough = True
    need = count_growth(state, inst, s, slot.steps, slot.steps + 1)
    if inst.defers_free and (need > inst.free or slot.left_out > 0):
        return _allocate_in_order(state, i, s, now)
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


def _allocate_in_order(state: State, i: int, s: int, now: float) -> bool:
    """The same if nobody may be preempted whose iteration runs: the iteration leaves out the first
    member without a block and all that joined after it. Those that the last one left out may be
    preempted."""
    inst, slot = get_instance(state, i), get_slot(state, s)
    has_enough = True
    r = slot.oldest
    while r != NONE:
        request = get_request(state, r)
        if not math.isnan(request.end):
            r = request.younger
            continue
        need = int(_needs_block(state, i, s, r))
        while need > inst.free:
            evict_all(state, i)
            last = inst.partial if inst.partial != NONE else slot.youngest
            if not _may_preempt(inst, get_request(state, last), now):
                break
            has_enough = False
            if last == inst.partial:
                _preempt_partial(state, i, now)
                continue
            _preempt(state, i, s, last, now)
            if last == r:
                r = NONE
                break
        if r == NONE or need > inst.free:
            break
        inst.free -= need
        if request.end_step == LEFT_OUT:
            slot.left_out -= 1
            add_member(state, i, s, r)
        r = request.younger
    _drop_rest(state, i, s, r)
    slot.decodes = int(slot.batch > 0)
    slot.rows = slot.batch
    slot.contexts = slot.context
    return has_enough


def _needs_block(state: State, i: int, s: int, r: int) -> bool:
    """Whether a member, left out or not, needs another block for its next token."""
    inst, slot, request = get_instance(state, i), get_slot(state, s), get_request(state, r)
    if request.end_step == LEFT_OUT:
        return int(request.prompt + request.generated - 1) % inst.block == 0
    return slot.steps % inst.block == find_phase(state, i, r)


def _drop_rest(state: State, i: int, s: int, first: int) -> None:
    """Leave out of the iteration what joined with member `first` or later."""
    slot = get_slot(state, s)
    r = slot.youngest if first != NONE else NONE
    while r != NONE:
        request = get_request(state, r)
        if math.isnan(request.end) and request.end_step != LEFT_OUT:
            _drop_member(state, i, s, r)
            request.end_step = LEFT_OUT
            slot.left_out += 1
        r = request.older if r != first else NONE


def _drop_member(state: State, i: int, s: int, r: int) -> int:
    """Count a member no longer, which may join again; return its KV tokens."""
    slot, request = get_slot(state, s), get_request(state, r)
    if request.end_step == LEFT_OUT:
        slot.left_out -= 1
        tokens: int = request.prompt + request.generated - 1
        return tokens
    remove_key(state, s, slot.batch, request.end_step << 32 | r)
    if slot.fresh == r:
        slot.fresh = request.next
    else:
        request.last_token = slot.decoded
    tokens = remove_member(state, i, s, r)
    request.generated = request.output - (request.end_step - slot.steps)
    return tokens


def _preempt(state: State, i: int, s: int, r: int, now: float) -> None:
    """Preempt a member: free its KV and put it at the head of the queue, to be recomputed."""
    tokens = _drop_member(state, i, s, r)
    drop_member_link(state, s, r)
    preempt_blocks(state, i, r, tokens, now)
    _requeue(state, i, r)


def _preempt_partial(state: State, i: int, now: float) -> None:
    """Preempt the prompt that is partly computed, as `_preempt` does."""
    inst = get_instance(state, i)
    r = inst.partial
    computed = get_request(state, r).computed
    preempt_blocks(state, i, r, computed, now)
    if get_request(state, r).is_whole:
        prompt_blocks = count_blocks(inst, get_request(state, r).to_compute)
        change_usage(inst, now, count_blocks(inst, computed) - prompt_blocks, 0)
    inst.partial = NONE
    _requeue(state, i, r)


def _requeue(state: State, i: int, r: int) -> None:
    inst, request = get_instance(state, i), get_request(state, r)
    request.to_compute = request.prompt + request.generated
    request.computed = 0
    request.preemptions += 1
    request.is_whole = 0
    inst.preemptions += 1
    inst.running -= 1
    push_front(state, i, r)


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
