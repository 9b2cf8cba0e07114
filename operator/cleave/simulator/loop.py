"""The events of a simulation in order of time. Compiled; `run.simulate` calls `run_events`.

Events are: a request arrives at the router, it reaches its instance, a hand-off reaches its decode
instance, a transfer ends, the passes of an instance end. What is hard: at equal times what comes
in goes before what an instance starts, so that a burst is batched; hence idle instances are woken,
not started.
"""

import math
from typing import Any

from cleave.simulator.completing import complete
from cleave.simulator.fleet import Dispatch
from cleave.simulator.forming import end_pull, form
from cleave.simulator.layout import DECODE, NONE, PREFILL, State
from cleave.simulator.lists import pop, pop_pull, push
from cleave.simulator.outcome import Fate
from cleave.simulator.passes import cut_leap
from cleave.simulator.routing import place


def run_events(
    requests: Any,
    instances: Any,
    slots: Any,
    queues: Any,
    fleet_row: Any,
    heaps: Any,
    phases: Any,
    stages: Any,
    tables: Any,
    scores: Any,
    tree: Any,
    pulls: Any,
) -> None:
    """Serve all requests; the arrays are those of `State`, in its order."""
    state = State(
        requests,
        instances,
        slots,
        queues,
        fleet_row,
        heaps,
        phases,
        stages,
        tables,
        scores,
        tree,
        pulls,
    )
    fleet = fleet_row[0]
    count = len(requests)
    arrived = 0
    delivered = 0
    hand_offs = 2 * len(instances)
    while fleet.events < fleet.max_events:
        fleet.events += 1
        arrival = requests[arrived].arrival if arrived < count else math.inf
        delivery = math.inf
        if delivered < arrived:
            delivery = requests[delivered].arrival + fleet.dispatch_ms
        hand_off = math.inf
        if queues[hand_offs].size > 0:
            hand_off = _find_hand_off_ms(state)
        pull = pulls[0].time if fleet.num_pulls > 0 else math.inf
        winner = tree[1]
        passes = instances[winner].next
        now = min(min(arrival, delivery), min(hand_off, pull))
        if passes < now:
            fleet.now = passes
            _step(state, winner, passes)
            continue
        if now == math.inf:
            break
        fleet.now = now
        if arrival == now:
            place(state, arrived)
            arrived += 1
        elif delivery == now:
            _deliver(state, delivered, now)
            delivered += 1
        elif hand_off == now:
            _hand_off(state, now)
        else:
            r = pop_pull(state)
            end_pull(state, r, now)
            request = requests[r]
            if request.prefill != NONE:
                _alert(state, request.prefill, now)
            _alert(state, request.decode, now)
    for r in range(count):
        if math.isnan(requests[r].end) and requests[r].fate == Fate.SERVED:
            requests[r].fate = Fate.UNFINISHED


def _deliver(state: State, r: int, now: float) -> None:
    """A placed request reaches its first instance."""
    fleet, request = state.fleet[0], state.requests[r]
    if request.fate != Fate.SERVED:
        return
    if not fleet.has_prefill:
        # Its prompt was computed elsewhere.
        request.prefill_end = request.arrival
        request.is_pulled = 1
        if not fleet.first_by_decode:
            request.made = 1
            request.first_token = request.arrival
            if request.output == 1:
                _end_at_once(state, r)
                return
    if fleet.dispatch == Dispatch.LATE:
        hand_offs = 2 * len(state.instances) + 1
        queue = hand_offs if request.is_pulled else hand_offs + 1
        push(state, queue, r)
        _announce(state, PREFILL if queue > hand_offs else DECODE, now)
        return
    i = request.prefill if request.prefill != NONE else request.decode
    push(state, i, r)
    _alert(state, i, now)


def _find_hand_off_ms(state: State) -> float:
    """When the oldest hand-off on its way reaches its decode instance."""
    r = state.queues[2 * len(state.instances)].head
    return state.requests[r].prefill_end + state.fleet[0].dispatch_ms


def _hand_off(state: State, now: float) -> None:
    """A computed prompt is offered to its decode instance."""
    r = pop(state, 2 * len(state.instances))
    if state.fleet[0].dispatch == Dispatch.LATE:
        push(state, 2 * len(state.instances) + 1, r)
        _announce(state, DECODE, now)
        return
    push(state, state.requests[r].decode, r)
    _alert(state, state.requests[r].decode, now)


def _announce(state: State, role: int, now: float) -> None:
    """Something waits centrally: whoever can take it first does."""
    for i in range(len(state.instances)):
        if (role == PREFILL and state.instances[i].role != DECODE) or (role == DECODE and state.instances[i].role != PREFILL):
            _alert(state, i, now)


def _alert(state: State, i: int, now: float) -> None:
    """Something new is at instance `i`: it looks as soon as its micro-batches allow."""
    inst = state.instances[i]
    if inst.in_flight == 1 and state.slots[inst.oldest].passes > 1:
        cut_leap(state, i, inst.oldest, now)
    if inst.in_flight < inst.stages:
        inst.wake = now
    _set_next(state, i)


def _step(state: State, i: int, now: float) -> None:
    """Passes of instance `i` end, or it was woken: form what comes next."""
    inst = state.instances[i]
    was_running = inst.in_flight > 0 and state.slots[inst.oldest].finish <= now
    if was_running:
        s = inst.oldest
        inst.oldest = state.slots[s].next
        inst.in_flight -= 1
        complete(state, i, s, now)
        form(state, i, s, now)
    if inst.wake <= now:
        inst.wake = math.inf
    if inst.stages > 1 or not was_running:
        while inst.in_flight < inst.stages and _has_work(state, i):
            s = inst.first_slot
            while state.slots[s].passes > 0:
                s += 1
            if not form(state, i, s, now):
                break
    _set_next(state, i)


def _has_work(state: State, i: int) -> bool:
    """Whether anything waits that a further micro-batch could take."""
    queues, num_instances = state.queues, len(state.instances)
    if queues[i].size > 0 or queues[num_instances + i].size > 0:
        return True
    if state.instances[i].partial != NONE:
        return True
    return queues[2 * num_instances + 1].size + queues[2 * num_instances + 2].size > 0


def _set_next(state: State, i: int) -> None:
    """Note when instance `i` acts next, and play its matches of the tournament again."""
    inst, instances, tree = state.instances[i], state.instances, state.tree
    following = inst.wake
    if inst.in_flight > 0:
        following = min(following, state.slots[inst.oldest].finish)
    inst.next = following
    at = (len(tree) // 2 + i) // 2
    while at > 0:
        left, right = tree[2 * at], tree[2 * at + 1]
        winner = left
        if left == NONE or (right != NONE and instances[right].next < instances[left].next):
            winner = right
        tree[at] = winner
        at //= 2


def _end_at_once(state: State, r: int) -> None:
    state.requests[r].end = state.requests[r].arrival
