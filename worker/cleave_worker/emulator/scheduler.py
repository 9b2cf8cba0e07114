"""Chooses the tokens of the next iteration: continuous batching as in vLLM's v1 scheduler.

The engine calls `schedule`, waits as long as the iteration takes, and calls `complete`; I/O is
outside, and time but for the clock that says which requests are late. Running sequences come first,
then waiting ones in order of arrival, all under one token budget (chunked prefill). When blocks run
out, the youngest running sequence is preempted and recomputed later. A scheduling configuration,
which may change between iterations, can change order, admission and preemption. A sequence whose KV
is being or has been pulled occupies blocks while it waits. So it is admitted before others, or both
could wait forever.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from cleave.perf.timing import PromptChunk
from cleave.policy.admission import Admission, is_protected
from cleave.policy.output_length import LengthPredictor
from cleave.policy.prompt_batching import compute_chunk_size
from cleave.policy.prompt_order import is_late
from cleave_worker.emulator.blocks import BlockPool
from cleave_worker.emulator.host_memory import HostMemory
from cleave_worker.emulator.sequence import FinishReason, Sequence, SequenceState
from cleave_worker.scheduling import config as scheduling_config
from cleave_worker.scheduling.admission import EngineAdmission, RequestLengths
from cleave_worker.scheduling.config import RoleSchedulingConfig, clamp_limit
from cleave_worker.scheduling.iteration_times import IterationTimes
from cleave_worker.scheduling.window import SortedWindow


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """vLLM's limits of one iteration, and its prefix cache switch."""

    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_caching: bool = True


@dataclass(slots=True)
class EngineStep:
    """One iteration: the tokens that it computes, and their cost."""

    scheduled: list[tuple[Sequence, int]] = field(default_factory=list)
    loads: list[Sequence] = field(default_factory=list)
    """Sequences that have blocks and wait for their KV to be pulled, or copied back."""
    chunks: list[PromptChunk] = field(default_factory=list)
    num_decode_tokens: int = 0
    """Sequences that compute a single token."""
    context_tokens: int = 0
    """Sum of the contexts of these sequences."""
    num_tokens: int = 0
    used_tokens: int = 0
    """Of all blocks in use."""
    scheduled_at: float = 0.0
    """Seconds, by the scheduler's clock."""

    def add(self, sequence: Sequence, count: int) -> None:
        """Compute the next `count` tokens of a sequence."""
        self.scheduled.append((sequence, count))
        self.num_tokens += count
        if count == 1:
            self.num_decode_tokens += 1
            self.context_tokens += sequence.num_computed + 1
        else:
            start = sequence.num_computed
            self.chunks.append(PromptChunk(start, start + count))


class SampledToken(NamedTuple):
    """A sampled token, and the finish reason if it ends its sequence."""

    sequence: Sequence
    token: int
    finish: FinishReason | None


class EmulatedScheduler:
    """All sequences of the engine and the blocks that they own."""

    def __init__(
        self,
        limits: EngineLimits,
        pool: BlockPool,
        predictor: LengthPredictor | None = None,
        host: HostMemory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`predictor`: of output lengths, for admission; None: learns from finished sequences.
        `host`: copies of KV outside the pool; None: there are none. `clock`: seconds, as of the
        sequences' `submitted_at`."""
        self.limits = limits
        self.pool = pool
        self.host = host
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.prefix_queries = self.prefix_hits = 0
        """Tokens of prompts that were looked up in the prefix cache, all if there is none, and
        those that it had."""
        self.pending_prompt_tokens = 0
        self._waiting: deque[Sequence] = deque()
        self._holding: dict[Sequence, bool] = {}
        """Those that hold blocks and do not run yet, in the order in which their loads began: is
        their KV here?"""
        self._leased_blocks: dict[str, list[int]] = {}
        self._admission = EngineAdmission(predictor)
        self._clock = clock
        self._times = IterationTimes()
        self._window = SortedWindow(self._waiting, _count_tokens_to_compute, self._is_late)
        self.apply_scheduling(scheduling_config.DEFAULT)

    def apply_scheduling(self, config: RoleSchedulingConfig) -> None:
        """Use this configuration from the next iteration on; running sequences continue."""
        self._scheduling = config
        limits = self.limits
        self._max_num_seqs = clamp_limit(config.max_num_seqs, limits.max_num_seqs)
        self._max_tokens = clamp_limit(config.max_num_batched_tokens, limits.max_num_batched_tokens)
        self._window.set_order(config.order, config.prefill_sched_batch)

    @property
    def num_waiting(self) -> int:
        """Sequences that are not in the batch."""
        return len(self._waiting) + len(self._holding)

    @property
    def num_leased(self) -> int:
        """Finished requests whose leased blocks wait to be pulled."""
        return len(self._leased_blocks)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. The engine has checked that it fits the pool when it is alone."""
        self.pending_prompt_tokens += sequence.pending_prompt_tokens
        self._window.add(sequence)

    def schedule(self) -> EngineStep:
        """Return the next iteration; if it has no sequences, nothing can run now."""
        step = EngineStep()
        # After a preemption no sequence is admitted, unless no other is left to run.
        if self._schedule_running(step) or not step.scheduled:
            self._admit(step)
        step.used_tokens, step.scheduled_at = self._used_tokens, self._clock()
        return step

    def complete(self, step: EngineStep) -> list[SampledToken]:
        """Return the tokens of an iteration; finished sequences free their blocks or lease them."""
        prompt_tokens = step.num_tokens - step.num_decode_tokens
        self._times.record(step.scheduled_at, self._clock(), prompt_tokens, step.used_tokens)
        outputs = []
        for sequence, count in step.scheduled:
            if sequence.state is SequenceState.FINISHED:
                continue
            pending = max(0, sequence.prompt_len - sequence.num_computed)
            self.pending_prompt_tokens -= min(pending, count)
            sequence.compute(count, self.pool)
            self._publish(sequence, sequence.num_computed - count)
            if sequence.num_computed < len(sequence.tokens):
                continue
            token, finish = sequence.sample()
            outputs.append(SampledToken(sequence, token, finish))
            if finish:
                if finish is FinishReason.STOP:
                    self._admission.learn(_get_lengths(sequence))
                self._retire(sequence, lease=sequence.request.do_remote_decode)
        self.running = [s for s in self.running if s.state is SequenceState.RUNNING]
        return outputs

    def load(self, sequence: Sequence, contents: list[int]) -> None:
        """Store the pulled KV of a loading sequence, one content per missing block."""
        first = sequence.cached_tokens // self.pool.block_size
        for block, content in zip(sequence.blocks[first:], contents, strict=True):
            self.pool.contents[block] = content
        sequence.pulled_tokens = sequence.prompt_len - sequence.cached_tokens
        self._finish_load(sequence)
        sequence.adopt(sequence.prompt_len, self.pool)
        self._publish(sequence, sequence.cached_tokens)

    def get_missing_keys(self, sequence: Sequence) -> list[bytes]:
        """Return the keys of the full blocks of a loading sequence's prompt that were not cached
        here; never that of its last token, which is always computed."""
        size = self.pool.block_size
        keys = sequence.compute_block_keys((len(sequence.tokens) - 1) // size, size)
        return keys[sequence.num_computed // size :]

    def load_prefix(self, sequence: Sequence, contents: list[int]) -> None:
        """Store the contents of the blocks that a loading sequence has pulled from another engine's
        cache or copied back from host memory; the rest of its prompt is computed. Empty: all."""
        size, before = self.pool.block_size, sequence.pending_prompt_tokens
        first = sequence.num_computed // size
        self._holding[sequence] = True
        sequence.source, sequence.on_host = None, []
        if not contents:
            return
        for block, content in zip(sequence.blocks[first:], contents, strict=False):
            self.pool.contents[block] = content
        start = sequence.num_computed
        sequence.pulled_tokens = len(contents) * size
        sequence.adopt(start + sequence.pulled_tokens, self.pool)
        self._publish(sequence, start)
        self.pending_prompt_tokens += sequence.pending_prompt_tokens - before

    def acquire_cached(self, name: str, keys: list[bytes]) -> list[int]:
        """Lease the cached blocks of the longest run of `keys`, so that they are not reused, and
        return their contents; `release` ends it."""
        blocks = self.pool.acquire_cached(keys) if self.limits.prefix_caching else []
        if blocks:
            self._leased_blocks[name] = blocks
        return [self.pool.contents[block] for block in blocks]

    def recompute(self, sequence: Sequence) -> None:
        """Compute a prompt whose pull failed here, in the blocks that it has."""
        before = sequence.pending_prompt_tokens
        self._finish_load(sequence)
        if sequence.cached_tokens:
            sequence.adopt(sequence.cached_tokens, self.pool)
        self.pending_prompt_tokens += sequence.pending_prompt_tokens - before

    def abort(self, sequence: Sequence) -> None:
        """Drop a sequence in any state; does nothing when it has ended."""
        if sequence.state is SequenceState.FINISHED:
            return
        self.pending_prompt_tokens -= sequence.pending_prompt_tokens
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
        elif sequence in self._holding:
            del self._holding[sequence]
        else:
            self._window.record_removal((sequence,))
            self._waiting.remove(sequence)
        self._retire(sequence, lease=False)

    def get_leased_contents(self, request_id: str, stale: bool = False) -> dict[int, int] | None:
        """Return the content of each block of a leased request, None without a lease. With `stale`,
        what the blocks contained before the request."""
        blocks = self._leased_blocks.get(request_id)
        if blocks is None:
            return None
        source = self.pool.previous_contents if stale else self.pool.contents
        return {block: source[block] for block in blocks}

    def release(self, request_id: str) -> bool:
        """Free a leased request's blocks; return whether there was a lease."""
        blocks = self._leased_blocks.pop(request_id, None)
        if blocks is None:
            return False
        self.pool.free(blocks)
        return True

    def _schedule_running(self, step: EngineStep) -> bool:
        """Add tokens of the running sequences; return whether no preemption was needed."""
        limit, prompt_limit = self._max_tokens, self._get_prompt_limit()
        size = self.pool.block_size
        index = 0
        sufficed = True
        if (allowed := self._scheduling.preemption_limit) and self.num_preemptions:
            # The last one is preempted first.
            self.running.sort(
                key=lambda s: (not is_protected(s.num_preemptions, allowed), s.submitted_at)
            )
        while index < len(self.running) and step.num_tokens < limit:
            sequence = self.running[index]
            remaining = len(sequence.tokens) - sequence.num_computed
            count = compute_chunk_size(remaining, min(limit - step.num_tokens, prompt_limit))
            missing = -(-(sequence.num_computed + count) // size) - len(sequence.blocks)
            while missing > self.pool.num_free and len(self.running) > index:
                self._preempt(self.running.pop())
                sufficed = False
            if len(self.running) == index:
                break
            if missing > 0:
                sequence.blocks += self.pool.allocate(missing)
            step.add(sequence, count)
            index += 1
        return sufficed

    def _admit(self, step: EngineStep) -> None:
        prompt_limit = self._get_prompt_limit()
        while step.num_tokens < self._max_tokens and len(self.running) < self._max_num_seqs:
            budget = min(self._max_tokens - step.num_tokens, prompt_limit)
            if loaded := next((s for s, is_here in self._holding.items() if is_here), None):
                sequence = loaded
                del self._holding[sequence]
                count = compute_chunk_size(len(sequence.tokens) - sequence.num_computed, budget)
            elif self._waiting:
                self._window.sort()
                sequence = self._waiting[0]
                count = self._allocate(sequence, budget) if self._may_join(sequence) else 0
                if not count:
                    break
                self._window.record_pop(self._waiting.popleft())
                if sequence.handoff or sequence.source or sequence.on_host:
                    sequence.state = SequenceState.LOADING
                    self._holding[sequence] = False
                    step.loads.append(sequence)
                    continue
            else:
                break
            sequence.state = SequenceState.RUNNING
            self.running.append(sequence)
            step.add(sequence, count)

    def _get_prompt_limit(self) -> int:
        """Return the most tokens of one prompt in an iteration; a lone prompt may take all."""
        threshold = self._scheduling.long_prefill_token_threshold
        is_alone = len(self.running) + self.num_waiting <= 1
        return self._max_tokens if not threshold or is_alone else threshold

    def _may_join(self, sequence: Sequence) -> bool:
        if sequence.request.do_remote_decode:
            return True  # It decodes on another instance.
        free, rule = self.pool.num_free * self.pool.block_size, self._scheduling.admission
        if rule is Admission.WITHIN_TPOT:
            is_first = not (self.running or self._holding)
            if is_first or sequence.num_preemptions:
                return True
            return self._keeps_tpot(sequence)
        return self._admission.may_join(rule, free, _get_lengths(sequence), self._iterate_decoding)

    def _keeps_tpot(self, sequence: Sequence) -> bool:
        own, times = len(sequence.tokens), self._times
        decode_ms = times.predict_decode_ms(self._used_tokens + own)
        alone_ms = times.predict_decode_ms(own)
        prompt_ms, now = self._predict_prompt_ms(sequence), self._clock()
        decoding = (
            (_get_lengths(each), (now - each.first_token_at) * 1000)
            for each in reversed(self.running)
            if each.first_token_at
        )
        tpot_ms, late = sequence.request.targets.tpot_ms, self._window.is_deferred(sequence)
        return self._admission.keeps_tpot(decode_ms, alone_ms, prompt_ms, tpot_ms, late, decoding)

    def _predict_prompt_ms(self, sequence: Sequence) -> float:
        """ms for what is not cached here; 0 if it comes from elsewhere, or a part of it that is not
        known yet."""
        if sequence.handoff or sequence.source:
            return 0.0
        size, tokens = self.pool.block_size, len(sequence.tokens)
        if self.limits.prefix_caching:
            keys = sequence.compute_block_keys((tokens - 1) // size, size)
            tokens -= self.pool.count_cached(keys) * size
        return self._times.predict_prompt_ms(tokens, self._max_tokens)

    @property
    def _used_tokens(self) -> int:
        """Tokens of all blocks in use."""
        pool = self.pool
        return (pool.num_blocks - pool.num_free) * pool.block_size

    def _is_late(self, sequence: Sequence) -> bool:
        """Whether it misses its TTFT target even if it is served now."""
        targets = sequence.request.targets
        if sequence.num_outputs:
            return False
        own_ms = targets.tpot_ms if sequence.handoff else self._predict_prompt_ms(sequence)
        waited_ms = (self._clock() - sequence.submitted_at) * 1000
        return is_late(targets.ttft_left_ms - waited_ms, own_ms)

    def _iterate_decoding(self) -> Iterator[RequestLengths]:
        return (_get_lengths(s) for s in self.running if len(s.tokens) - s.num_computed == 1)

    def _allocate(self, sequence: Sequence, budget: int) -> int:
        """Allocate blocks for the next tokens of a waiting sequence; return how many tokens."""
        size = self.pool.block_size
        num_tokens = len(sequence.tokens)
        keys = list[bytes]()
        if self.limits.prefix_caching:
            keys = sequence.compute_block_keys((num_tokens - 1) // size, size)
        # Although it takes blocks only for what it computes (vLLM's scheduler_reserve_full_isl).
        if -(-num_tokens // size) - self.pool.count_shared(keys) > self.pool.num_free:
            return 0
        cached_blocks = self.pool.acquire_cached(keys)
        cached = len(cached_blocks) * size
        remaining = num_tokens - cached
        if sequence.source and (num_tokens - 1) // size == len(cached_blocks):
            sequence.source = None
        if self.host and not (sequence.handoff or sequence.source or sequence.num_preemptions):
            sequence.on_host = self.host.find(keys[len(cached_blocks) :])
        # A sequence that waits for its KV holds blocks, so it gets all that it needs.
        is_whole = sequence.handoff or sequence.source or sequence.on_host
        count = remaining if is_whole else compute_chunk_size(remaining, budget)
        missing = -(-(cached + count) // size) - len(cached_blocks)
        sequence.blocks = cached_blocks + self.pool.allocate(missing)
        if not sequence.num_preemptions:
            sequence.cached_tokens = cached
            self.prefix_queries += num_tokens
            self.prefix_hits += cached
        if cached and not sequence.handoff:
            before = sequence.pending_prompt_tokens
            sequence.adopt(cached, self.pool)
            self.pending_prompt_tokens -= before - sequence.pending_prompt_tokens
        return count

    def _preempt(self, sequence: Sequence) -> None:
        before = sequence.pending_prompt_tokens
        self.pool.free(sequence.blocks)
        sequence.reset()
        self.pending_prompt_tokens += sequence.pending_prompt_tokens - before
        sequence.state = SequenceState.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(sequence)
        self._window.record_prepend()

    def _finish_load(self, sequence: Sequence) -> None:
        sequence.handoff = None
        self._holding[sequence] = True

    def _retire(self, sequence: Sequence, lease: bool) -> None:
        sequence.state = SequenceState.FINISHED
        if self.host and self.limits.prefix_caching:
            size = self.pool.block_size
            count = min(sequence.num_computed, sequence.prompt_len) // size
            contents = [self.pool.contents[block] for block in sequence.blocks[:count]]
            self.host.keep(sequence.compute_block_keys(count, size), contents)
        if lease:
            self._leased_blocks[sequence.request.id] = sequence.blocks
        else:
            self.pool.free(sequence.blocks)
            sequence.blocks = []

    def _publish(self, sequence: Sequence, start: int) -> None:
        """Enter the blocks that became full since `start` tokens into the prefix cache."""
        size = self.pool.block_size
        first, last = start // size, sequence.num_computed // size
        if first == last or not self.limits.prefix_caching:
            return
        keys = sequence.compute_block_keys(last, size)
        for index in range(first, last):
            self.pool.publish(sequence.blocks[index], keys[index])


def _get_lengths(sequence: Sequence) -> RequestLengths:
    return RequestLengths(sequence.prompt_len, sequence.num_outputs, sequence.request.max_tokens)


def _count_tokens_to_compute(sequence: Sequence) -> int:
    return 1 if sequence.handoff else len(sequence.tokens)
