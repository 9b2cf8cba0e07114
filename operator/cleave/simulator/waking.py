"""When each instance acts next. Compiled."""

from cleave.simulator.completing import interrupt
from cleave.simulator.layout import DECODE, NONE, PREFILL, State
from cleave.simulator.rows import instance_at, node_at, slot_at


def alert(state: State, i: int, now: float) -> None:
    """Something new is at instance `i`: it looks as soon as its micro-batches allow."""
    inst = instance_at(state, i)
    if inst.in_flight == 1 and slot_at(state, inst.oldest).passes > 1:
        interrupt(state, i, inst.oldest, now)
    if inst.in_flight < inst.stages:
        inst.wake = now
    set_next(state, i)


def announce(state: State, queue: int, now: float) -> None:
    """A central queue has another head: whoever can take it first does."""
    closed = PREFILL if queue == 2 * state.num_instances + 1 else DECODE
    for i in range(state.num_instances):
        if instance_at(state, i).role != closed:
            alert(state, i, now)


def set_next(state: State, i: int) -> None:
    """Note when instance `i` acts next, and play its matches of the tournament again."""
    inst = instance_at(state, i)
    following = inst.wake
    if inst.in_flight > 0:
        following = min(following, slot_at(state, inst.oldest).finish)
    inst.next = following
    at = (state.num_leaves + i) // 2
    while at > 0:
        left, right = node_at(state, 2 * at).value, node_at(state, 2 * at + 1).value
        winner = left
        if left == NONE or (
            right != NONE and instance_at(state, right).next < instance_at(state, left).next
        ):
            winner = right
        node_at(state, at).value = winner
        at //= 2
