"""Which instance acts next: a tournament between the times of their next events. Compiled."""

from cleave.simulator.layout import NONE, State
from cleave.simulator.rows import instance_at, node_at, slot_at


def wake(state: State, i: int, now: float) -> None:
    """Let instance `i` look for work now if it has an idle micro-batch."""
    inst = instance_at(state, i)
    if inst.in_flight < inst.stages:
        inst.wake = now
    set_next(state, i)


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
