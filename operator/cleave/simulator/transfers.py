"""Transfers of KV from prefill to decode instances. Compiled.

What is hard: transfers of one prefill instance may share its link, and those that end at the same
time must be completed in the order in which they began.
"""

from cleave.simulator.completion import interrupt_leap
from cleave.simulator.host_memory import retire_blocks
from cleave.simulator.iterations import wake_instance
from cleave.simulator.queues import push_loaded
from cleave.simulator.record_access import get_instance, get_pull, get_request, get_slot
from cleave.simulator.records import NONE, State


def start_pull(state: State, s: int, r: int, cached: int, now: float) -> None:
    """Start the transfer of request `r`, whose decode instance has reserved blocks for it. `s`: the
    slot whose next iteration is being formed; the pull may lengthen that iteration. `cached`:
    tokens that the decode instance has in its own cache; vLLM's connectors do not pull them."""
    request, slot = get_request(state, r), get_slot(state, s)
    end = now
    request.transfer_start = now
    if request.prefill != NONE:
        source = get_instance(state, request.prefill)
        tokens = -(-(request.prompt - cached) // source.block) * source.block
        token_ms = state.token
        if request.prompt >= state.overlap_from:
            token_ms = max(token_ms - state.overlapped_token, 0.0)
        if state.is_shared:
            request.transfer_start = max(now, source.link)
        end = request.transfer_start + state.latency + tokens * token_ms
        source.link = end
        if slot.pulls == 0:
            slot.pulls = state.receiver
        slot.pulls += tokens * state.receiver_token
    if end > now:
        push_pull(state, end, r)
    else:
        end_pull(state, r, now)


def end_pull(state: State, r: int, now: float) -> None:
    """The KV of request `r` has arrived: free it on the prefill instance; it may decode."""
    request = get_request(state, r)
    request.transfer_end = now
    request.is_pulled = 0
    if request.prefill != NONE:
        # Freed blocks may admit waiting requests, and after a role flip this instance may decode.
        interrupt_leap(state, request.prefill, now, True)
        retire_blocks(state, request.prefill, r, request.prompt, now)
        wake_instance(state, request.prefill, now)
    request.queued = now
    push_loaded(state, request.decode, r)


def push_pull(state: State, time: float, r: int) -> None:
    """Add the transfer of request `r`, which ends at `time`, to the heap."""
    at = state.num_pulls
    state.num_pulls += 1
    pull = get_pull(state, at)
    pull.time = time
    pull.request = r
    while at > 0 and _ends_before(state, at, (at - 1) >> 1):
        _swap_pulls(state, at, (at - 1) >> 1)
        at = (at - 1) >> 1


def pop_pull(state: State) -> int:
    """Remove the transfer that ends first from the heap; return its request."""
    first: int = get_pull(state, 0).request
    state.num_pulls -= 1
    count = state.num_pulls
    _swap_pulls(state, 0, count)
    at = 0
    while 2 * at + 1 < count:
        child = 2 * at + 1
        if child + 1 < count and _ends_before(state, child + 1, child):
            child += 1
        if not _ends_before(state, child, at):
            break
        _swap_pulls(state, child, at)
        at = child
    return first


def _ends_before(state: State, one: int, other: int) -> bool:
    """Whether one transfer ends before another; at equal times the one that started first does."""
    first, second = get_pull(state, one), get_pull(state, other)
    ends: bool = first.time < second.time
    if first.time == second.time:
        one_order = get_request(state, first.request).pull_order
        ends = one_order < get_request(state, second.request).pull_order
    return ends


def _swap_pulls(state: State, one: int, other: int) -> None:
    first, second = get_pull(state, one), get_pull(state, other)
    first.time, second.time = second.time, first.time
    first.request, second.request = second.request, first.request
