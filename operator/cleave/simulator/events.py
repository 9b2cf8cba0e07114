"""The events of a simulation in order of time. Compiled; `run.simulate` calls `run_events`.

Events: a request arrives at the router, it reaches its instance, a handoff reaches its decode
instance, a transfer ends, the iterations of an instance end. What is hard: at equal times, arrivals
come before the start of an iteration, so that a burst is batched; therefore an idle instance is
scheduled to wake up at the same time instead of being started at once.
"""

import math

from cleave.simulator.batching import form
from cleave.simulator.completion import alert, complete, end_request
from cleave.simulator.dispatch import place
from cleave.simulator.event_tree import set_next
from cleave.simulator.outcome import Fate
from cleave.simulator.pipeline import spin
from cleave.simulator.queues import has_waiting, pop, push
from cleave.simulator.record_access import (
    instance_at,
    node_at,
    pull_at,
    queue_at,
    request_at,
    slot_at,
)
from cleave.simulator.records import DECODE, HAND_OFFS, NONE, PREFILL, PROMPTS, Records, State
from cleave.simulator.role_flipping import look
from cleave.simulator.transfers import end_pull, pop_pull


def run_events(rows: Records) -> None:
    """Serve all requests; `rows` holds one STATE.

    Each turn of the loop handles the earliest event: 1. a role-flip check, if it is due; 2. the end
    of an instance's iterations; 3. otherwise an arrival, a delivery, a handoff or the end of a
    transfer, in this order at equal times.
    """
    state = rows[0]
    count = state.num_requests
    hand_offs = 2 * state.num_instances
    while state.events < state.max_events:
        state.events += 1
        arrived, delivered = state.num_arrived, state.num_delivered
        arrival = request_at(state, arrived).arrival if arrived < count else math.inf
        delivery = math.inf
        if delivered < arrived:
            delivery = request_at(state, delivered).arrival + state.dispatch_ms
        hand_off = math.inf
        if queue_at(state, hand_offs).size > 0:
            hand_off = _find_hand_off_ms(state)
        pull = pull_at(state, 0).time if state.num_pulls > 0 else math.inf
        winner = node_at(state, 1).value
        passes = instance_at(state, winner).next
        now = min(min(arrival, delivery), min(hand_off, pull))
        earliest = min(now, passes)
        if state.look <= earliest < math.inf:
            if not look(state, state.look, earliest):
                # A check that changes nothing cannot be part of thrashing.
                state.events -= 1
            continue
        if passes < now:
            if instance_at(state, winner).stages > 1 and spin(state, winner, now):
                set_next(state, winner)
                continue
            state.now = passes
            _step(state, winner, passes)
            if state.offered:
                _announce(state, state.offered, passes)
            continue
        if now == math.inf:
            break
        state.now = now
        if arrival == now:
            place(state, arrived)
            state.num_arrived += 1
        elif delivery == now:
            _deliver(state, delivered, now)
            state.num_delivered += 1
        elif hand_off == now:
            _hand_off(state, now)
        else:
            r = pop_pull(state)
            end_pull(state, r, now)
            alert(state, request_at(state, r).decode, now)
    for r in range(count):
        if math.isnan(request_at(state, r).end) and request_at(state, r).fate == Fate.SERVED:
            request_at(state, r).fate = Fate.UNFINISHED


def _deliver(state: State, r: int, now: float) -> None:
    """A dispatched request reaches its first instance."""
    request = request_at(state, r)
    if request.fate != Fate.SERVED:
        return
    if not state.has_prefill:
        # A fleet of decode instances only: the prompt was computed outside of the simulation.
        request.prefill_end = request.arrival
        request.is_pulled = 1
        if not state.first_by_decode:
            request.made = 1
            request.todo = request.prompt + 1
            request.first_token = request.arrival
            if request.output == 1:
                end_request(state, r, request.arrival)
                return
    if state.is_deferred:
        hand_offs = 2 * state.num_instances + 1
        push(state, hand_offs if request.is_pulled else hand_offs + 1, r)
        _announce(state, HAND_OFFS if request.is_pulled else PROMPTS, now)
        return
    i = request.prefill if request.prefill != NONE else request.decode
    push(state, i, r)
    alert(state, i, now)


def _find_hand_off_ms(state: State) -> float:
    """When the oldest handoff in delivery reaches its decode instance, in ms."""
    r = queue_at(state, 2 * state.num_instances).head
    return request_at(state, r).prefill_end + state.dispatch_ms


def _hand_off(state: State, now: float) -> None:
    """The oldest handoff in delivery reaches its decode instance, or the central queue."""
    r = pop(state, 2 * state.num_instances)
    if state.is_deferred:
        push(state, 2 * state.num_instances + 1, r)
        _announce(state, HAND_OFFS, now)
        return
    push(state, request_at(state, r).decode, r)
    alert(state, request_at(state, r).decode, now)


def _step(state: State, i: int, now: float) -> None:
    """Iterations of instance `i` end, or it wakes up: start its next iterations."""
    inst = instance_at(state, i)
    has_ended = inst.in_flight > 0 and slot_at(state, inst.oldest).finish <= now
    if has_ended:
        s = inst.oldest
        inst.oldest = slot_at(state, s).next
        inst.in_flight -= 1
        complete(state, i, s, now)
        form(state, i, s, now)
    if inst.wake <= now:
        inst.wake = math.inf
    if inst.stages > 1 or not has_ended:
        while inst.in_flight < inst.stages and _has_work(state, i):
            s = inst.first_slot
            while slot_at(state, s).passes > 0:
                s += 1
            if not form(state, i, s, now):
                break
    set_next(state, i)


def _has_work(state: State, i: int) -> bool:
    """Whether requests wait that another micro-batch of instance `i` could take."""
    if queue_at(state, state.num_instances + i).size > 0:
        return True
    return instance_at(state, i).partial != NONE or has_waiting(state, i)


def _announce(state: State, queues: int, now: float) -> None:
    """Central queues have a new head: notify every instance that may take it."""
    state.offered = 0
    for i in range(state.num_instances):
        role = instance_at(state, i).role
        if (role != PREFILL and queues & HAND_OFFS) or (role != DECODE and queues & PROMPTS):
            alert(state, i, now)
