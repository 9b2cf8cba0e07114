"""How long iterations take, many at a time. Compiled.

What is hard: between two changes of a batch each decode iteration adds one token to every context,
so their times form an arithmetic series. A leap simulates the whole series in one event; when a
request arrives, the leap is cut at the end of the current iteration. With pipeline stages an
iteration runs through the stages behind the previous one (a flow shop), and as many micro-batches
as stages are in flight. They wait for each other, so one leap cannot cover them; but while no
request joins or leaves, only times have to be updated (`advance_pipeline`).
"""

import math

from cleave.perf.timing import compute_iteration_ms
from cleave.simulator.inter_token_latency import record_gaps, record_series
from cleave.simulator.kv_blocks import change_usage, count_growth, find_last_affordable_step
from cleave.simulator.queues import has_waiting_requests
from cleave.simulator.record_access import (
    get_heap_key,
    get_instance,
    get_node,
    get_points,
    get_queue,
    get_request,
    get_slot,
    get_stage,
)
from cleave.simulator.records import NONE, Record, State


def start_iterations(state: State, i: int, s: int, begin: float, is_alone: bool) -> None:
    """Start the iteration that slot `s` has formed, at `begin`. `is_alone`: no request can join
    before one of the members ends, so a leap is possible."""
    inst, slot = get_instance(state, i), get_slot(state, s)
    first = predict_iteration_ms(state, inst, slot, slot.contexts) + slot.pulls
    slot.begin = begin
    slot.first = first
    slot.change = 0.0
    slot.iterations = 1
    slot.finish = run_stages(state, i, slot) if inst.stages > 1 else begin + first
    # Pulls lengthen only the first iteration, so a series with pulls is not arithmetic.
    if is_alone and slot.tokens == 0 and slot.pulls == 0 and inst.in_flight == 0:
        end = get_heap_key(state, s * state.heap_size).value >> 32
        end = find_last_affordable_step(state, inst, s, slot.steps + 1, end)
        iterations = end - slot.steps
        if iterations > 1:
            contexts = slot.contexts + (iterations - 1) * slot.rows
            last = predict_iteration_ms(state, inst, slot, contexts)
            slot.iterations = iterations
            slot.change = (last - first) / (iterations - 1)
            slot.finish = begin + iterations * (first + last) / 2
    slot.next = NONE
    if inst.in_flight == 0:
        inst.oldest = s
    else:
        get_slot(state, inst.newest).next = s
    inst.newest = s
    inst.in_flight += 1
    if slot.decodes and inst.ranks == 1:
        _record_first_iteration(state, slot)


def synchronize_ranks(state: State, first_rank: int, ranks: int) -> None:
    """Let the iterations that the ranks of an instance have formed take as long as the longest."""
    longest, change, iterations = 0.0, 0.0, 1 << 60
    for i in range(first_rank, first_rank + ranks):
        inst = get_instance(state, i)
        if inst.in_flight > 0:
            slot = get_slot(state, inst.oldest)
            iterations = min(iterations, slot.iterations)
            if slot.first > longest or (slot.first == longest and slot.change > change):
                longest, change = slot.first, slot.change
    # The longest of all is a series only while it is the same rank's.
    last = longest + (iterations - 1) * change
    for i in range(first_rank, first_rank + ranks):
        inst = get_instance(state, i)
        if inst.in_flight > 0:
            slot = get_slot(state, inst.oldest)
            if slot.first + (iterations - 1) * slot.change > last:
                iterations = 1
                break
    for i in range(first_rank, first_rank + ranks):
        inst = get_instance(state, i)
        if inst.in_flight > 0:
            slot = get_slot(state, inst.oldest)
            slot.first, slot.change = longest, change if iterations > 1 else 0.0
            slot.iterations = iterations
            slot.finish = slot.begin + sum_leap_ms(slot, iterations)
            if slot.decodes:
                _record_first_iteration(state, slot)


def find_running_rank(state: State, i: int) -> int:
    """A rank of the instance of `i` with an iteration in flight; NONE: all are idle."""
    first_rank = get_instance(state, i).first_rank
    for other in range(first_rank, first_rank + get_instance(state, i).ranks):
        if get_instance(state, other).in_flight > 0:
            return other
    return NONE


def predict_decode_ms(state: State, inst: Record, batch: int, contexts: int) -> float:
    """ms of a decode iteration over all stages, if an instance holds `contexts` tokens."""
    ms: float = compute_iteration_ms(
        inst.prompt_step,
        get_points(state, inst.prompt_table, inst.prompt_points),
        inst.prompt_square,
        get_points(state, inst.decode_table, inst.decode_points),
        get_points(state, inst.context_table, inst.context_points),
        get_points(state, inst.mixed_table, inst.mixed_points),
        0.0,
        0.0,
        batch,
        float(contexts) / inst.stages,
    )
    if inst.stages > 1:
        ms += (inst.stages - 1) * (inst.hop + inst.hop_token * batch)
    return ms


def predict_iteration_ms(state: State, inst: Record, slot: Record, contexts: int) -> float:
    """ms of one iteration of the slot over all stages, with the sum of contexts `contexts`."""
    ms = compute_iteration_ms(
        inst.prompt_step,
        get_points(state, inst.prompt_table, inst.prompt_points),
        inst.prompt_square,
        get_points(state, inst.decode_table, inst.decode_points),
        get_points(state, inst.context_table, inst.context_points),
        get_points(state, inst.mixed_table, inst.mixed_points),
        float(slot.tokens),
        float(slot.squares),
        slot.rows,
        float(contexts),
    )
    return ms + (inst.stages - 1) * _compute_hop_ms(inst, slot)


def sum_leap_ms(slot: Record, iterations: int) -> float:
    """Milliseconds of the first `iterations` of a leap."""
    return iterations * slot.first + slot.change * (iterations * (iterations - 1) / 2)


def compute_busy_ms(inst: Record, slot: Record) -> float:
    """How long the first stage is busy with the iterations of a slot, in ms."""
    iterations = slot.iterations
    ms = sum_leap_ms(slot, iterations)
    if inst.stages > 1:
        hop = _compute_hop_ms(inst, slot)
        ms = (ms - iterations * (inst.stages - 1) * hop) / inst.stages + iterations * hop
    return ms


def cut_leap(slot: Record, now: float, scheduled: int) -> None:
    """Shorten the leap of a slot so that it ends with the iteration that runs at `now`, or
    `scheduled` iterations later."""
    slot.iterations = min(find_running_iteration(slot, now) + scheduled, slot.iterations)
    slot.finish = slot.begin + sum_leap_ms(slot, slot.iterations)


def find_running_iteration(slot: Record, now: float) -> int:
    """The number of the iteration of a leap that runs at `now`, from 1."""
    elapsed = now - slot.begin
    half = slot.first - slot.change / 2
    divisor = half + math.sqrt(max(half * half + 2 * slot.change * elapsed, 0.0))
    iterations = slot.iterations
    if divisor > 0:
        iterations = int(min(max(math.ceil(2 * elapsed / divisor), 1.0), float(slot.iterations)))
    while iterations > 1 and sum_leap_ms(slot, iterations - 1) >= elapsed:
        iterations -= 1
    while iterations < slot.iterations and sum_leap_ms(slot, iterations) < elapsed:
        iterations += 1
    return iterations


def reduce_to_last_iteration(state: State, i: int, s: int) -> None:
    """Reduce a leap to its last iteration, after all others have been accounted for."""
    inst, slot = get_instance(state, i), get_slot(state, s)
    before = slot.iterations - 1
    slot.begin += sum_leap_ms(slot, before)
    slot.first += slot.change * before
    slot.change = 0.0
    slot.iterations = 1
    slot.rows = slot.batch
    slot.contexts = slot.context
    if inst.stages > 1:
        # The first iteration occupied the stages when the leap began; a later one does so now.
        last = get_stage(state, i * state.max_stages + inst.stages - 1).value
        slot.finish = run_stages(state, i, slot) if before > 0 else last
    if before > 0:
        _record_tokens(state, slot, slot.finish, slot.batch)


def run_stages(state: State, i: int, slot: Record) -> float:
    """Run an iteration through all stages, each after the previous iteration; its end in ms."""
    inst = get_instance(state, i)
    hop = _compute_hop_ms(inst, slot)
    stage = (slot.first - (inst.stages - 1) * hop) / inst.stages
    at = slot.begin
    last = inst.stages - 1
    for index in range(last):
        at = max(at, get_stage(state, i * state.max_stages + index).value) + stage + hop
        get_stage(state, i * state.max_stages + index).value = at
    at = max(at, get_stage(state, i * state.max_stages + last).value) + stage
    get_stage(state, i * state.max_stages + last).value = at
    return at


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
    _record_tokens(state, slot, slot.finish, batch)


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


def _compute_hop_ms(inst: Record, slot: Record) -> float:
    if inst.stages == 1:
        return 0.0
    return inst.hop + inst.hop_token * (slot.tokens + slot.rows)


def _record_first_iteration(state: State, slot: Record) -> None:
    """Record its tokens, and when members begin to decode and get their first ones."""
    end = slot.begin + slot.first if slot.iterations > 1 else slot.finish
    members = slot.batch
    r = slot.fresh
    while r != NONE:
        request = get_request(state, r)
        members -= 1
        if request.generated > 0:
            record_gaps(state, end, end - request.last_token, 1)
        if math.isnan(request.decode_start):
            request.decode_start = slot.begin
        if math.isnan(request.first_token):
            request.first_token = end
        r = request.next
    slot.fresh = NONE
    _record_tokens(state, slot, end, members)


def record_leap(state: State, slot: Record, end: float) -> None:
    """Record the tokens of a leap until `end` but for those of its first iteration."""
    slot.decoded = end
    if end < state.itl_begin or slot.begin >= state.itl_end:
        return
    first, last = 2, slot.iterations
    if slot.begin < state.itl_begin:
        first = max(first, find_running_iteration(slot, state.itl_begin))
    if end >= state.itl_end:
        last = find_running_iteration(slot, state.itl_end) - 1
    if first <= last:
        gap = slot.first + (first - 1) * slot.change
        record_series(state, gap, slot.change, last + 1 - first, slot.batch)


def _record_tokens(state: State, slot: Record, end: float, members: int) -> None:
    """That many members, which decoded in the slot's previous such iteration, get one at `end`."""
    record_gaps(state, end, end - slot.decoded, members)
    slot.decoded = end


def wake_instance(state: State, i: int, now: float) -> None:
    """Schedule a wake-up of instance `i` at `now` if it has an idle slot, and no other rank
    computes."""
    inst = get_instance(state, i)
    if inst.in_flight < inst.stages and (inst.ranks == 1 or find_running_rank(state, i) == NONE):
        inst.wake = now
    schedule_next(state, i)


def schedule_next(state: State, i: int) -> None:
    """Recompute the next event of instance `i` and its path to the root of the tree."""
    inst = get_instance(state, i)
    earliest = inst.wake
    if inst.in_flight > 0:
        earliest = min(earliest, get_slot(state, inst.oldest).finish)
    inst.next = earliest
    at = (state.num_leaves + i) // 2
    while at > 0:
        left, right = get_node(state, 2 * at).value, get_node(state, 2 * at + 1).value
        winner = left
        if left == NONE or (
            right != NONE and get_instance(state, right).next < get_instance(state, left).next
        ):
            winner = right
        get_node(state, at).value = winner
        at //= 2
