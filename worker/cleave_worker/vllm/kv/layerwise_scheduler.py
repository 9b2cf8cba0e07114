"""Prefills that consumers pull while they run; the scheduler side.

Used by `SchedulerSide`. A block is final when the step that fills it has ended, not when it is in
the prefix cache. vLLM enters blocks there before they are computed, so that two requests of one
step can share them. Blocks that a step finds there count as computed in it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

from cleave_worker.transfer.block_leases import PrefillInProgress
from cleave_worker.vllm.kv.metadata import ComputedChunk


@dataclass(slots=True)
class _TrackedPrefill:
    prefill: PrefillInProgress
    num_tokens: int
    blocks: tuple[int, ...] = ()
    num_final: int = 0


class InFlightPrefills:
    """Tracked prefills by request id; preempted ones are forgotten, as vLLM frees their blocks."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._prefills: dict[str, _TrackedPrefill] = {}

    def begin(self, request_id: str, prefill: PrefillInProgress, num_tokens: int) -> None:
        """Track a prefill whose prompt has `num_tokens` tokens."""
        self._prefills[request_id] = _TrackedPrefill(prefill, num_tokens)

    def end(self, request_id: str) -> PrefillInProgress | None:
        """End a prefill; returns None when it was not tracked or has been preempted."""
        tracked = self._prefills.pop(request_id, None)
        return tracked.prefill if tracked else None

    def advance(self, output: SchedulerOutput) -> tuple[dict[str, ComputedChunk], set[str]]:
        """Return (chunks that a step computes of tracked prefills, preempted prefills)."""
        if not self._prefills:
            return {}, set()
        preempted = self._prefills.keys() & (output.preempted_req_ids or set())
        for request_id in preempted:
            del self._prefills[request_id]
        chunks = {}
        for request_id, new_blocks, num_computed in _iterate_scheduled(output):
            tracked = self._prefills.get(request_id)
            if tracked is None or tracked.num_final == tracked.prefill.num_blocks:
                continue
            tracked.blocks = (*tracked.blocks, *new_blocks)[: tracked.prefill.num_blocks]
            computed = num_computed + output.num_scheduled_tokens[request_id]
            final = self._count_final(tracked, computed)
            chunks[request_id] = ComputedChunk(
                tracked.blocks, tracked.num_final, final, final == tracked.prefill.num_blocks
            )
            tracked.num_final = final
        return chunks, set(preempted)

    def _count_final(self, tracked: _TrackedPrefill, num_computed: int) -> int:
        if num_computed >= tracked.num_tokens:
            return tracked.prefill.num_blocks
        return num_computed // self._block_size


def _iterate_scheduled(output: SchedulerOutput) -> Iterator[tuple[str, Any, int]]:
    """Yield (request id, new blocks, tokens computed before) for every request of a step."""
    for request in output.scheduled_new_reqs:
        yield request.req_id, request.block_ids[0], request.num_computed_tokens
    cached = output.scheduled_cached_reqs
    for request_id, blocks, num_computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        yield request_id, blocks[0] if blocks else (), num_computed
