"""Prefills that a decode engine follows while they run, as this engine's scheduler sees them.

Asked by the scheduler's half of the connector (scheduler.py). What is hard: a block is final when
the step that fills it is over, not when it is in the prefix cache: vLLM enters blocks there before
they are computed, so that two requests of one step may share them. What a step finds there counts
as computed in it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

from cleave_worker.transfer.holds import Begun
from cleave_worker.vllm.kv.orders import Chunk


@dataclass(slots=True)
class _Running:
    begun: Begun
    num_tokens: int
    blocks: tuple[int, ...] = ()
    num_final: int = 0


class Running:
    """Request ids with how far they are; forgets what vLLM preempts, for its blocks are gone."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._running: dict[str, _Running] = {}

    def begin(self, request_id: str, begun: Begun, num_tokens: int) -> None:
        """A prompt of so many tokens has come."""
        self._running[request_id] = _Running(begun, num_tokens)

    def end(self, request_id: str) -> Begun | None:
        """The request is over; None: it was not followed, or has been preempted."""
        one = self._running.pop(request_id, None)
        return one.begun if one else None

    def step(self, output: SchedulerOutput) -> tuple[dict[str, Chunk], set[str]]:
        """(what a step computes of prefills that are followed, those that were preempted)."""
        if not self._running:
            return {}, set()
        lost = self._running.keys() & (output.preempted_req_ids or set())
        for request_id in lost:
            del self._running[request_id]
        chunks = {}
        for request_id, new_blocks, num_computed in _scheduled(output):
            one = self._running.get(request_id)
            if one is None or one.num_final == one.begun.num_blocks:
                continue
            one.blocks = (*one.blocks, *new_blocks)[: one.begun.num_blocks]
            computed = num_computed + output.num_scheduled_tokens[request_id]
            final = self._count_final(one, computed)
            chunks[request_id] = Chunk(
                one.blocks, one.num_final, final, final == one.begun.num_blocks
            )
            one.num_final = final
        return chunks, set(lost)

    def _count_final(self, one: _Running, num_computed: int) -> int:
        if num_computed >= one.num_tokens:
            return one.begun.num_blocks
        return num_computed // self._block_size


def _scheduled(output: SchedulerOutput) -> Iterator[tuple[str, Any, int]]:
    """(request id, blocks that it got, tokens computed before) of all that a step computes."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.block_ids[0], new.num_computed_tokens
    known = output.scheduled_cached_reqs
    for request_id, blocks, num_computed in zip(
        known.req_ids, known.new_block_ids, known.num_computed_tokens, strict=True
    ):
        yield request_id, blocks[0] if blocks else (), num_computed
