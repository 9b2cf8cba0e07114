"""KV blocks of an instance: who needs how many, and the integral of what is held. Compiled.

What is hard: members of a batch take a block each time their context crosses a block's end. A
slot counts its members by the step, modulo the block size, at which that happens (`phases`), so
that the blocks of a thousand passes are known without making them.
"""

from cleave.simulator.layout import PREFILL, Record, State


def count_blocks(inst: Record, tokens: int) -> int:
    """Blocks that a request with KV of `tokens` holds."""
    if inst.reserve:
        return inst.reserve
    return -(-tokens // inst.block)


def fits(state: State, i: int, r: int) -> bool:
    """Whether instance `i`, with nothing else to do, has the blocks for its part of request `r`."""
    inst, request = state.instances[i], state.requests[r]
    # The last token is never written.
    tokens = request.prompt if inst.role == PREFILL else request.prompt + request.output - 1
    blocks = -(-tokens // inst.block)
    return blocks <= inst.blocks and (inst.reserve == 0 or blocks <= inst.reserve <= inst.blocks)


def hold(inst: Record, now: float, blocks: int, tokens: int) -> None:
    """Take blocks for `tokens` more tokens; negative amounts give them back."""
    inst.kv_area += inst.kv_tokens * (now - inst.kv_at)
    inst.kv_at = now
    inst.free -= blocks
    inst.kv_tokens += tokens
    inst.kv_peak = max(inst.kv_peak, inst.kv_tokens)


def count_growth(state: State, inst: Record, s: int, start: int, end: int) -> int:
    """Blocks that the members of slot `s` take for its steps `start` <= step < `end`."""
    if inst.reserve or end <= start:
        return 0
    cycles = (end - start) // inst.block
    blocks = cycles * state.slots[s].batch
    for step in range(start + cycles * inst.block, end):
        blocks += state.phases[s, step % inst.block]
    return blocks


def find_last_step(state: State, inst: Record, s: int, start: int, end: int) -> int:
    """The first step in `start` <= step < `end` for which free blocks do not suffice, else `end`."""
    batch = state.slots[s].batch
    if inst.reserve or batch * (-(-(end - start) // inst.block)) <= inst.free:
        return end
    cycles = inst.free // batch
    left = inst.free - cycles * batch
    step = start + cycles * inst.block
    while step < end:
        left -= state.phases[s, step % inst.block]
        if left < 0:
            break
        step += 1
    return min(step, end)
