"""KV blocks of an instance: how many a request needs, and the integral of their use. Compiled.

What is hard: a member of a batch takes another block each time its context crosses a block's end.
A slot counts its members by the step, modulo the block size, at which that happens (`phases`), so
that the blocks of a thousand iterations can be computed without simulating them one by one.
"""

from cleave.simulator.record_access import get_instance, get_phase, get_request, get_slot
from cleave.simulator.records import PREFILL, Record, State


def count_blocks(inst: Record, tokens: int) -> int:
    """Blocks that a request with `tokens` of KV holds."""
    if inst.reserve:
        return inst.reserve
    return -(-tokens // inst.block)


def fits_instance(state: State, i: int, r: int) -> bool:
    """Whether an empty instance `i` has the blocks for its part of request `r`."""
    inst, request = get_instance(state, i), get_request(state, r)
    # The last token's KV is never written.
    tokens = request.prompt if inst.role == PREFILL else request.prompt + request.output - 1
    blocks = -(-tokens // inst.block)
    return blocks <= inst.blocks and (inst.reserve == 0 or blocks <= inst.reserve <= inst.blocks)


def change_usage(inst: Record, now: float, blocks: int, tokens: int) -> None:
    """Allocate `blocks` for `tokens` more tokens; negative amounts free them."""
    inst.kv_area += inst.kv_tokens * (now - inst.kv_at)
    inst.kv_at = now
    inst.free -= blocks
    inst.kv_tokens += tokens
    inst.kv_peak = max(inst.kv_peak, inst.kv_tokens)


def count_growth(state: State, inst: Record, s: int, start: int, end: int) -> int:
    """Blocks that the members of slot `s` need for its steps `start` <= step < `end`."""
    if inst.reserve or end <= start:
        return 0
    cycles = (end - start) // inst.block
    blocks = cycles * get_slot(state, s).batch
    for step in range(start + cycles * inst.block, end):
        blocks += get_phase(state, s * state.max_block + step % inst.block).value
    return blocks


def find_last_affordable_step(state: State, inst: Record, s: int, start: int, end: int) -> int:
    """The first step from `start` to `end` that lacks free blocks; `end` if none does."""
    batch = get_slot(state, s).batch
    if inst.reserve or batch * (-(-(end - start) // inst.block)) <= inst.free:
        return end
    cycles = inst.free // batch
    remaining = inst.free - cycles * batch
    step = start + cycles * inst.block
    while step < end:
        remaining -= get_phase(state, s * state.max_block + step % inst.block).value
        if remaining < 0:
            break
        step += 1
    return min(step, end)
