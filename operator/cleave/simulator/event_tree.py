"""Which instance has the next event: a tournament tree over their next times. Compiled."""

from cleave.simulator.record_access import instance_at, node_at, slot_at
from cleave.simulator.records import NONE, State


def wake(state: State, i: int, now: float) -> None:
    """Make instance `i` look for work at `now` if it has an idle slot."""
    inst = instance_at(state, i)
    if inst.in_flight < inst.stages:
        inst.wake = now
    set_next(state, i)


def set_next(state: State, i: int) -> None:
    """Recompute the next event of instance `i` and its path to the root of the tree."""
    inst = instance_at(state, i)
    earliest = inst.wake
    if inst.in_flight > 0:
        earliest = min(earliest, slot_at(state, inst.oldest).finish)
    inst.next = earliest
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
