"""Which instance has the next event: a tournament tree over their next times. Compiled."""

from cleave.simulator.record_access import get_instance, get_node, get_slot
from cleave.simulator.records import NONE, State


def wake_instance(state: State, i: int, now: float) -> None:
    """Schedule a wake-up of instance `i` at `now` if it has an idle slot."""
    inst = get_instance(state, i)
    if inst.in_flight < inst.stages:
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
