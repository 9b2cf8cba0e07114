"""The events of a simulation in order of time. Compiled; `run.simulate` calls `run_events`.

Events: a request arrives at the router, it reaches its instance, a handoff reaches its decode
instance, a transfer ends, the iterations of an instance end. What is hard: at equal times, arrivals
come before the start of an iteration, so that a burst is batched; therefore an idle instance is
scheduled to wake up at the same time instead of being started at once.
"""

import math

from cleave.simulator.batching import form_batch
from cleave.simulator.completion import complete_iterations, complete_request, notify_instance
from cleave.simulator.dispatch import dispatch_request
from cleave.simulator.iterations import advance_pipeline, schedule_next, synchronize_ranks
from cleave.simulator.outcome import RequestOutcome
from cleave.simulator.prefix_caches import has_caches
from cleave.simulator.prefix_pulls import end_fetch, is_fetching
from cleave.simulator.queues import has_waiting_requests, pop, push
from cleave.simulator.record_access import (
    get_instance,
    get_node,
    get_pull,
    get_queue,
    get_request,
    get_slot,
)
from cleave.simulator.records import DECODE, HANDOFFS, NONE, PREFILL, PROMPTS, State
from cleave.simulator.role_flipping import check_flip
from cleave.simulator.transfers import end_pull, pop_pull


def run_events_with_caches(state: State) -> None:
    """`run_events` for a trace whose prompts repeat: compiled separately, see `prefix_caches`."""
    run_events(state)


def run_events(state: State) -> None:
    """Serve all requests.

    The loop handles the earliest event: 1. a role-flip check, if it is due; 2. the end of an
    instance's iterations; 3. otherwise an arrival, a delivery, a handoff or the end of a transfer,
    in this order at equal times.
    """
    count = state.num_requests
    handoffs = 2 * state.num_instances
    while state.events < state.max_events:
        state.events += 1
        arrived, delivered = state.num_arrived, state.num_delivered
        arrival = get_request(state, arrived).arrival if arrived < count else math.inf
        delivery = math.inf
        if delivered < arrived:
            delivery = get_request(state, delivered).arrival + state.dispatch_ms
        handoff = math.inf
        if get_queue(state, handoffs).size > 0:
            handoff = _get_next_handoff_ms(state)
        pull = get_pull(state, 0).time if state.num_pulls > 0 else math.inf
        winner = get_node(state, 1).value
        next_step = get_instance(state, winner).next
        now = min(min(arrival, delivery), min(handoff, pull))
        earliest = min(now, next_step)
        if state.next_flip_check <= earliest < math.inf:
            if not check_flip(state, state.next_flip_check, earliest):
                # A check that changes nothing cannot be part of thrashing.
                state.events -= 1
            continue
        if next_step < now:
            until = min(now, state.next_flip_check)
            if get_instance(state, winner).stages > 1 and advance_pipeline(state, winner, until):
                schedule_next(state, winner)
                continue
            state.now = next_step
            _step_instance(state, winner, next_step)
            if state.offered:
                _notify_instances(state, state.offered, next_step)
            continue
        if now == math.inf:
            break
        state.now = now
        if arrival == now:
            dispatch_request(state, arrived)
            state.num_arrived += 1
        elif delivery == now:
            _deliver_request(state, delivered, now)
            state.num_delivered += 1
        elif handoff == now:
            _deliver_handoff(state, now)
        else:
            _end_transfer(state, now)
    for r in range(count):
        request = get_request(state, r)
        if math.isnan(request.end) and request.outcome == RequestOutcome.SERVED:
            request.outcome = RequestOutcome.UNFINISHED


def _end_transfer(state: State, now: float) -> None:
    """The transfer that ends first has ended."""
    r = pop_pull(state)
    if is_fetching(state, r):
        notify_instance(state, end_fetch(state, r, now), now, False)
        return
    end_pull(state, r, now)
    i = get_request(state, r).decode
    # A pull that waits may find its prefix cached.
    notify_instance(state, i, now, has_caches() and get_queue(state, i).size > 0)


def _deliver_request(state: State, r: int, now: float) -> None:
    """A dispatched request reaches its first instance."""
    request = get_request(state, r)
    if request.outcome != RequestOutcome.SERVED:
        return
    if not state.has_prefill:
        # A fleet of decode instances only: the prompt was computed outside of the simulation.
        request.prefill_end = request.arrival
        request.is_pulled = 1
        if not state.first_by_decode:
            request.generated = 1
            request.to_compute = request.prompt + 1
            request.first_token = request.last_token = request.arrival
            if request.output == 1:
                complete_request(state, r, request.arrival)
                return
    if state.is_deferred:
        handoffs = 2 * state.num_instances + 1
        push(state, handoffs if request.is_pulled else handoffs + 1, r)
        _notify_instances(state, HANDOFFS if request.is_pulled else PROMPTS, now)
        return
    i = request.prefill if request.prefill != NONE else request.decode
    request.queued = now
    push(state, i, r)
    notify_instance(state, i, now, request.is_pulled)


def _get_next_handoff_ms(state: State) -> float:
    """When the oldest handoff in delivery reaches its decode instance, in ms."""
    r = get_queue(state, 2 * state.num_instances).head
    return get_request(state, r).prefill_end + state.dispatch_ms


def _deliver_handoff(state: State, now: float) -> None:
    """The oldest handoff in delivery reaches its decode instance, or the central queue."""
    r = pop(state, 2 * state.num_instances)
    if state.is_deferred:
        push(state, 2 * state.num_instances + 1, r)
        _notify_instances(state, HANDOFFS, now)
        return
    push(state, get_request(state, r).decode, r)
    notify_instance(state, get_request(state, r).decode, now, True)


def _step_instance(state: State, i: int, now: float) -> None:
    """Iterations of instance `i` end, or it wakes up: start its next iterations."""
    inst = get_instance(state, i)
    if inst.ranks > 1:
        _step_ranks(state, inst.first_rank, inst.ranks, now)
        return
    has_ended = inst.in_flight > 0 and get_slot(state, inst.oldest).finish <= now
    if has_ended:
        s = inst.oldest
        inst.oldest = get_slot(state, s).next
        inst.in_flight -= 1
        complete_iterations(state, i, s, now)
        form_batch(state, i, s, now)
    if inst.wake <= now:
        inst.wake = math.inf
    if inst.stages > 1 or not has_ended:
        while inst.in_flight < inst.stages and _has_work(state, i):
            s = inst.first_slot
            while get_slot(state, s).iterations > 0:
                s += 1
            if not form_batch(state, i, s, now):
                break
    schedule_next(state, i)


def _step_ranks(state: State, first_rank: int, ranks: int, now: float) -> None:
    """The same for the data-parallel ranks of an instance, whose iterations end at once."""
    for i in range(first_rank, first_rank + ranks):
        inst = get_instance(state, i)
        inst.wake = math.inf
        if inst.in_flight > 0:
            s = inst.oldest
            inst.in_flight = 0
            complete_iterations(state, i, s, now)
    for i in range(first_rank, first_rank + ranks):
        inst = get_instance(state, i)
        has_members = get_slot(state, inst.first_slot).batch + inst.num_ended > 0
        if has_members or _has_work(state, i):
            form_batch(state, i, inst.first_slot, now)
    synchronize_ranks(state, first_rank, ranks)
    for i in range(first_rank, first_rank + ranks):
        schedule_next(state, i)


def _has_work(state: State, i: int) -> bool:
    """Whether requests wait that another micro-batch of instance `i` could take."""
    if get_queue(state, state.num_instances + i).size > 0:
        return True
    return get_instance(state, i).partial != NONE or has_waiting_requests(state, i)


def _notify_instances(state: State, queues: int, now: float) -> None:
    """Central queues have a new head: notify every instance that may take it."""
    state.offered = 0
    for i in range(state.num_instances):
        role = get_instance(state, i).role
        if (role != PREFILL and queues & HANDOFFS) or (role != DECODE and queues & PROMPTS):
            notify_instance(state, i, now, True)
