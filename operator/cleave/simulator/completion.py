"""What happens at the end of an iteration: tokens, ended requests, computed prompts. Compiled."""

import math

from cleave.simulator.dispatch import remove_prompt_load, remove_resident_load
from cleave.simulator.host_memory import retire_blocks
from cleave.simulator.inter_token_latency import record_gaps
from cleave.simulator.iterations import (
    compute_busy_ms,
    cut_leap,
    find_running_rank,
    record_leap,
    reduce_to_last_iteration,
    schedule_next,
    sum_leap_ms,
    wake_instance,
)
from cleave.simulator.kv_blocks import change_usage, count_growth
from cleave.simulator.prefix_caches import has_caches, preempt_blocks
from cleave.simulator.queues import (
    add_member,
    drop_member_link,
    is_unsorted,
    link_as_youngest,
    push,
    remove_key,
    remove_member,
)
from cleave.simulator.record_access import get_heap_key, get_instance, get_request, get_slot
from cleave.simulator.records import NONE, State


def complete_iterations(state: State, i: int, s: int, now: float) -> None:
    """The iterations of slot `s` are over: remove ended requests, complete computed prompts."""
    slot, inst = get_slot(state, s), get_instance(state, i)
    iterations = slot.iterations
    inst.busy += compute_busy_ms(inst, slot)
    inst.iterations += iterations
    inst.batch_peak = max(inst.batch_peak, slot.rows)
    if inst.schedules_ahead:
        inst.scheduled = slot.begin + sum_leap_ms(slot, iterations - 1)
    if iterations > 1:
        record_leap(state, slot, now)
    slot.iterations = 0
    if slot.decodes:
        _advance_members(state, i, s, iterations, now)
    r = slot.first_prompt
    slot.first_prompt = NONE
    while r != NONE:
        next_r = get_request(state, r).next
        _complete_prompt(state, i, s, r, now)
        r = next_r


def notify_instance(state: State, i: int, now: float, is_pulled: bool) -> None:
    """Make instance `i` schedule new work as soon as its current iterations allow. `is_pulled`: the
    work is a pull, which starts when it is scheduled."""
    inst = get_instance(state, i)
    # An idle rank has scheduled nothing while others compute; and an engine sorts its queue when it
    # schedules the next iteration.
    is_now = is_pulled or inst.in_flight == 0 or is_unsorted(inst)
    scheduled = 0 if is_now else inst.schedules_ahead
    # With one stage nothing else can start during the leap, so it is accounted for at its end.
    interrupt_leap(state, i, now, inst.stages > 1, scheduled)
    wake_instance(state, i, now)


def interrupt_leap(
    state: State, i: int, now: float, is_accounted: bool, scheduled: int = 0
) -> None:
    """Cut the leap of instance `i`, if there is one, after the current iteration and those that are
    `scheduled`.

    `is_accounted`: account for all iterations before the current one now, because another batch may
    start or memory may be freed before the current one ends. The leap of data-parallel ranks is cut
    for all of them.
    """
    inst = get_instance(state, i)
    if inst.ranks == 1:
        _interrupt_engine(state, i, now, is_accounted, scheduled)
        return
    running = find_running_rank(state, i)
    if running == NONE or get_slot(state, get_instance(state, running).oldest).iterations == 1:
        return
    for rank in range(inst.first_rank, inst.first_rank + inst.ranks):
        _interrupt_engine(state, rank, now, is_accounted, scheduled)
        schedule_next(state, rank)


def _interrupt_engine(state: State, i: int, now: float, is_accounted: bool, scheduled: int) -> None:
    inst = get_instance(state, i)
    s = inst.oldest
    if inst.in_flight != 1 or get_slot(state, s).iterations == 1:
        return
    slot = get_slot(state, s)
    cut_leap(slot, now, scheduled)
    if not is_accounted:
        return
    iterations = slot.iterations - 1
    if iterations > 0:
        _account_iterations(state, i, s, iterations, now)
    reduce_to_last_iteration(state, i, s)


def _account_iterations(state: State, i: int, s: int, iterations: int, now: float) -> None:
    """Account for the first `iterations` of a leap, so that other events use its current memory."""
    slot, inst = get_slot(state, s), get_instance(state, i)
    slot.iterations = iterations
    inst.busy += compute_busy_ms(inst, slot)
    inst.iterations += iterations
    end = slot.begin + sum_leap_ms(slot, iterations)
    record_leap(state, slot, end)
    _advance_members(state, i, s, iterations, now)
    inst.kv_area += slot.batch * iterations * (now - end)
    inst.free -= count_growth(state, inst, s, slot.steps, slot.steps + 1)
    slot.iterations = iterations + 1


def _advance_members(state: State, i: int, s: int, iterations: int, now: float) -> None:
    """Each member has generated `iterations` tokens; remove the members that have ended."""
    slot, inst = get_slot(state, s), get_instance(state, i)
    batch = slot.batch
    blocks = 0
    if iterations > 1:
        blocks = count_growth(state, inst, s, slot.steps + 1, slot.steps + iterations)
        earlier = iterations * (iterations - 1) / 2
        squares = earlier * (2 * iterations - 1) / 3
        inst.kv_area += batch * (slot.first * earlier + slot.change * squares)
    change_usage(inst, now, blocks, batch * iterations)
    slot.steps += iterations
    slot.context += batch * iterations
    inst.decode_iterations += iterations
    inst.decode_tokens += batch * iterations
    while slot.batch > 0:
        key = get_heap_key(state, s * state.heap_size).value
        if key >> 32 > slot.steps:
            break
        r = key & 0xFFFFFFFF
        if has_caches():
            r = _find_oldest_ending(state, s)
        remove_key(state, s, slot.batch, get_request(state, r).end_step << 32 | r)
        remove_member(state, i, s, r)
        _end_request(state, i, s, r, now)


def _find_oldest_ending(state: State, s: int) -> int:
    """Of the members that end now, of which there is one, that which joined first: in this order
    their blocks are evicted."""
    slot = get_slot(state, s)
    r: int = slot.oldest
    while get_request(state, r).end_step > slot.steps or not math.isnan(get_request(state, r).end):
        r = get_request(state, r).younger
    return r


def _complete_prompt(state: State, i: int, s: int, r: int, now: float) -> None:
    """All KV of a prompt is computed, which yields an output token."""
    request = get_request(state, r)
    if math.isnan(request.prefill_end):
        request.prefill_end = now
        remove_prompt_load(state, r)
    if request.prefill == i:
        _complete_prefill(state, i, s, r, now)
        return
    if request.generated > 0:
        record_gaps(state, now, now - request.last_token, 1)
    request.last_token = now
    request.generated += 1
    if math.isnan(request.first_token):
        request.first_token = now
    if math.isnan(request.transfer_start):
        request.transfer_start = now
        request.transfer_end = now
    if request.generated == request.output:
        _end_request(state, i, s, r, now)
    else:
        add_member(state, i, s, r)


def _complete_prefill(state: State, i: int, s: int, r: int, now: float) -> None:
    """A prefill instance has computed a prompt: end the request or offer its KV for the pull."""
    inst, request = get_instance(state, i), get_request(state, r)
    if not state.has_decode or not state.first_by_decode:
        request.generated = 1
        request.to_compute = request.prompt + 1
        request.first_token = request.last_token = now
    if not state.has_decode or request.generated == request.output:
        link_as_youngest(state, s, r)
        _end_request(state, i, s, r, now)
        return
    if inst.schedules_ahead:
        inst.num_ended += 1
    else:
        inst.running -= 1
    request.is_pulled = 1
    push(state, 2 * state.num_instances, r)


def _end_request(state: State, i: int, s: int, r: int, now: float) -> None:
    """A request in the list of members has ended. An engine that schedules ahead knows of it when
    it has scheduled the next iteration, for which its blocks and its seat are not free."""
    inst, request = get_instance(state, i), get_request(state, r)
    if not inst.schedules_ahead:
        inst.running -= 1
        _free_ended(state, i, s, r, now)
    else:
        inst.num_ended += 1
        request.next = NONE
        if inst.first_ended == NONE:
            inst.first_ended = r
        else:
            get_request(state, inst.last_ended).next = r
        inst.last_ended = r
    complete_request(state, r, now)


def release_ended(state: State, i: int, s: int, now: float) -> bool:
    """Free blocks and seats of the requests that have ended in the last iteration of an engine that
    schedules ahead; False: there were none."""
    inst = get_instance(state, i)
    if inst.num_ended == 0 and inst.first_sent == NONE:
        return False
    inst.running -= inst.num_ended
    inst.num_ended = 0
    r = inst.first_ended
    inst.first_ended = NONE
    while r != NONE:
        next_r = get_request(state, r).next
        _free_ended(state, i, s, r, now)
        r = next_r
    while inst.first_sent != NONE:
        r = inst.first_sent
        inst.first_sent = get_request(state, r).next_sent
        retire_blocks(state, i, r, get_request(state, r).prompt, now)
    return True


def release_sent(state: State, i: int, r: int, now: float) -> None:
    """Free blocks of request `r`, whose KV was pulled from instance `i`: if it schedules ahead,
    when the iteration after the one that runs is formed, as those of requests that end."""
    inst = get_instance(state, i)
    if not inst.schedules_ahead or inst.in_flight == 0:
        retire_blocks(state, i, r, get_request(state, r).prompt, now)
        return
    get_request(state, r).next_sent = NONE
    if inst.first_sent == NONE:
        inst.first_sent = r
    else:
        get_request(state, inst.last_sent).next_sent = r
    inst.last_sent = r


def preempt_ended(state: State, i: int, s: int, r: int, now: float) -> None:
    """Preempt a request that has ended, of which the engine does not know yet."""
    inst, request = get_instance(state, i), get_request(state, r)
    before = NONE
    other = inst.first_ended
    while other != r:
        before = other
        other = get_request(state, other).next
    if before == NONE:
        inst.first_ended = request.next
    else:
        get_request(state, before).next = request.next
    if inst.last_ended == r:
        inst.last_ended = before
    inst.num_ended -= 1
    inst.running -= 1
    inst.preemptions += 1
    request.preemptions += 1
    drop_member_link(state, s, r)
    preempt_blocks(state, i, r, _count_final_tokens(state, i, r), now)


def _free_ended(state: State, i: int, s: int, r: int, now: float) -> None:
    drop_member_link(state, s, r)
    retire_blocks(state, i, r, _count_final_tokens(state, i, r), now)


def _count_final_tokens(state: State, i: int, r: int) -> int:
    """Tokens of KV of a request that has ended. That of its last token is never written."""
    request = get_request(state, r)
    tokens: int = request.prompt
    if request.prefill != i:
        tokens += request.output - 1
    return tokens


def complete_request(state: State, r: int, now: float) -> None:
    """All output tokens of request `r` are generated."""
    get_request(state, r).end = now
    if state.first_counted <= r < state.end_counted:
        _count_outcome(state, r)
    remove_resident_load(state, r)


def _count_outcome(state: State, r: int) -> None:
    """Count a request that has ended; end the simulation when its verdict is known."""
    request = get_request(state, r)
    ttft = request.first_token - request.arrival
    tpot = (request.end - request.first_token) / max(request.output - 1, 1)
    state.counted_left -= 1
    if not (ttft <= state.max_ttft and tpot <= state.max_tpot):
        state.misses_left -= 1
    if state.counted_left == 0 or state.misses_left < 0:
        state.max_events = state.events
