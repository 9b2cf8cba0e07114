"""Which tokens the next iteration computes: continuous batching as vLLM's v1 scheduler does it.

The engine calls `schedule`, waits as long as the iteration takes, and calls `complete`; nothing
here knows of time or I/O. Running sequences come first, then waiting ones in order of arrival, all
under one token budget (chunked prefill). When blocks run out the youngest running sequence is
preempted and recomputed later. Terms, which may change between two passes, say otherwise: who is
first, who is let in, whom preemption spares. What is hard: KV that is being pulled or has been
pulled holds blocks while it waits, so such sequences get in before others, or both could wait for
ever.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from cleave.perf.timing import Chunk
from cleave.policy.admission import is_spared
from cleave.policy.batching import cut_chunk
from cleave.policy.lengths import Predictor
from cleave_worker.emulator.blocks import BlockPool
from cleave_worker.emulator.sequence import Finish, Sequence, State
from cleave_worker.scheduling import terms
from cleave_worker.scheduling.admitting import Admitting, Lengths
from cleave_worker.scheduling.terms import Terms, find_limit
from cleave_worker.scheduling.window import Window


@dataclass(frozen=True, slots=True)
class Limits:
    """vLLM's limits of one iteration and its prefix cache switch."""

    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_caching: bool = True


@dataclass(slots=True)
class Step:
    """One iteration: what it computes and what it costs."""

    scheduled: list[tuple[Sequence, int]] = field(default_factory=list)
    loads: list[Sequence] = field(default_factory=list)
    """Sequences that have blocks now and wait for their KV to be pulled."""
    chunks: list[Chunk] = field(default_factory=list)
    batch: int = 0
    """Sequences that compute a single token."""
    context_tokens: int = 0
    """Sum of those sequences' contexts."""
    num_tokens: int = 0

    def add(self, sequence: Sequence, count: int) -> None:
        """Compute the next `count` tokens of a sequence."""
        self.scheduled.append((sequence, count))
        self.num_tokens += count
        if count == 1:
            self.batch += 1
            self.context_tokens += sequence.num_computed + 1
        else:
            start = sequence.num_computed
            self.chunks.append(Chunk(start, start + count))


class Output(NamedTuple):
    """A token of a sequence, and why the sequence ended if it did."""

    sequence: Sequence
    token: int
    finish: Finish | None


class Scheduler:
    """Every sequence of the engine and the blocks they own."""

    def __init__(self, limits: Limits, pool: BlockPool, predictor: Predictor | None = None) -> None:
        """`predictor`: of outputs, for admission; None: it learns what ends here."""
        self.limits = limits
        self.pool = pool
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.pending_prompt_tokens = 0
        self._waiting: deque[Sequence] = deque()
        self._loaded: deque[Sequence] = deque()
        self._loading: set[Sequence] = set()
        self._held: dict[str, list[int]] = {}
        self._admitting = Admitting(predictor)
        self._window = Window(self._waiting, _tokens_to_compute)
        self.follow(terms.DEFAULT)

    def follow(self, terms: Terms) -> None:
        """Schedule like this from the next pass on; what runs goes on running."""
        self._terms = terms
        limits = self.limits
        self._max_num_seqs = find_limit(terms.max_num_seqs, limits.max_num_seqs)
        self._max_tokens = find_limit(terms.max_num_batched_tokens, limits.max_num_batched_tokens)
        self._window.follow(terms.order, terms.prefill_sched_batch)

    @property
    def num_waiting(self) -> int:
        """Sequences that are in no batch."""
        return len(self._waiting) + len(self._loaded) + len(self._loading)

    @property
    def num_held(self) -> int:
        """Finished requests whose blocks wait to be pulled."""
        return len(self._held)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. It fits the pool when it is alone: the engine has checked."""
        self.pending_prompt_tokens += sequence.pending_prompt_tokens
        self._waiting.append(sequence)

    def schedule(self) -> Step:
        """The next iteration; without scheduled sequences nothing can run now."""
        step = Step()
        # After a preemption nobody new gets in, unless that left nobody to run.
        if self._schedule_running(step) or not step.scheduled:
            self._admit(step)
        return step

    def complete(self, step: Step) -> list[Output]:
        """The tokens of an iteration. Finished sequences are gone, their blocks free or held."""
        outputs = []
        for sequence, count in step.scheduled:
            if sequence.state is State.FINISHED:
                continue
            pending = max(0, sequence.prompt_len - sequence.num_computed)
            self.pending_prompt_tokens -= min(pending, count)
            sequence.compute(count, self.pool)
            self._publish(sequence, sequence.num_computed - count)
            if sequence.num_computed < len(sequence.tokens):
                continue
            token, finish = sequence.sample()
            outputs.append(Output(sequence, token, finish))
            if finish:
                if finish is Finish.STOP:
                    self._admitting.learn(_lengths(sequence))
                self._retire(sequence, hold=sequence.request.hold)
        self.running = [s for s in self.running if s.state is State.RUNNING]
        return outputs

    def load(self, sequence: Sequence, contents: list[int]) -> None:
        """The pulled KV of a loading sequence has come, one content for each missing block."""
        first = sequence.cached_tokens // self.pool.block_size
        for block, content in zip(sequence.blocks[first:], contents, strict=True):
            self.pool.contents[block] = content
        sequence.pulled_tokens = sequence.prompt_len - sequence.cached_tokens
        self._end_load(sequence)
        sequence.adopt(sequence.prompt_len, self.pool)
        self._publish(sequence, sequence.cached_tokens)

    def recompute(self, sequence: Sequence) -> None:
        """The pull failed: compute the prompt here, in the blocks that are there."""
        before = sequence.pending_prompt_tokens
        self._end_load(sequence)
        if sequence.cached_tokens:
            sequence.adopt(sequence.cached_tokens, self.pool)
        self.pending_prompt_tokens += sequence.pending_prompt_tokens - before

    def abort(self, sequence: Sequence) -> None:
        """Drop a sequence wherever it is; harmless when it has ended."""
        if sequence.state is State.FINISHED:
            return
        self.pending_prompt_tokens -= sequence.pending_prompt_tokens
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
        elif sequence in self._loading:
            self._loading.remove(sequence)
        else:
            queue = self._loaded if sequence in self._loaded else self._waiting
            if queue is self._waiting:
                self._window.leave((sequence,))
            queue.remove(sequence)
        self._retire(sequence, hold=False)

    def held_contents(self, request_id: str, stale: bool = False) -> dict[int, int] | None:
        """Block -> content of a held request, None when there is none.

        With `stale`, what the blocks held before the request.
        """
        blocks = self._held.get(request_id)
        if blocks is None:
            return None
        source = self.pool.former if stale else self.pool.contents
        return {block: source[block] for block in blocks}

    def release(self, request_id: str) -> bool:
        """Free a held request's blocks; whether there was one."""
        blocks = self._held.pop(request_id, None)
        if blocks is None:
            return False
        self.pool.give_back(blocks)
        return True

    def _schedule_running(self, step: Step) -> bool:
        """Tokens of the running sequences; whether the blocks sufficed without preemption."""
        limit, most = self._max_tokens, self._most_of_a_prompt()
        size = self.pool.block_size
        index = 0
        sufficed = True
        if (most_preemptions := self._terms.preemption_limit) and self.num_preemptions:
            # The last one is preempted first.
            self.running.sort(
                key=lambda s: (not is_spared(s.num_preemptions, most_preemptions), s.submitted_at)
            )
        while index < len(self.running) and step.num_tokens < limit:
            sequence = self.running[index]
            left = len(sequence.tokens) - sequence.num_computed
            count = cut_chunk(left, min(limit - step.num_tokens, most))
            missing = -(-(sequence.num_computed + count) // size) - len(sequence.blocks)
            while missing > self.pool.num_free and len(self.running) > index:
                self._preempt(self.running.pop())
                sufficed = False
            if len(self.running) == index:
                break
            if missing > 0:
                sequence.blocks += self.pool.take(missing)
            step.add(sequence, count)
            index += 1
        return sufficed

    def _admit(self, step: Step) -> None:
        most = self._most_of_a_prompt()
        while step.num_tokens < self._max_tokens and len(self.running) < self._max_num_seqs:
            budget = min(self._max_tokens - step.num_tokens, most)
            if self._loaded:
                sequence = self._loaded.popleft()
                count = cut_chunk(len(sequence.tokens) - sequence.num_computed, budget)
            elif self._waiting:
                self._window.sort()
                sequence = self._waiting[0]
                count = self._allocate(sequence, budget) if self._may_join(sequence) else 0
                if not count:
                    break
                self._waiting.popleft()
                self._window.took()
                if sequence.hand_off:
                    sequence.state = State.LOADING
                    self._loading.add(sequence)
                    step.loads.append(sequence)
                    continue
            else:
                break
            sequence.state = State.RUNNING
            self.running.append(sequence)
            step.add(sequence, count)

    def _most_of_a_prompt(self) -> int:
        """Tokens of one prompt in a pass; alone it may take all."""
        threshold = self._terms.long_prefill_token_threshold
        is_alone = len(self.running) + self.num_waiting <= 1
        return self._max_tokens if not threshold or is_alone else threshold

    def _may_join(self, sequence: Sequence) -> bool:
        if sequence.request.hold:
            # It decodes elsewhere.
            return True
        free = self.pool.num_free * self.pool.block_size
        admission = self._terms.admission
        return self._admitting.may_join(admission, free, _lengths(sequence), self._decoding)

    def _decoding(self) -> Iterator[Lengths]:
        return (_lengths(s) for s in self.running if len(s.tokens) - s.num_computed == 1)

    def _allocate(self, sequence: Sequence, budget: int) -> int:
        """Give a waiting sequence the blocks for its next tokens; how many tokens, 0 for none."""
        size = self.pool.block_size
        num_tokens = len(sequence.tokens)
        shared: list[int] = []
        if self.limits.prefix_caching:
            shared = self.pool.share(sequence.block_keys((num_tokens - 1) // size, size))
        cached = len(shared) * size
        left = num_tokens - cached
        count = left if sequence.hand_off else cut_chunk(left, budget)
        missing = -(-(cached + count) // size) - len(shared)
        if missing > self.pool.num_free:
            self.pool.give_back(shared)
            return 0
        sequence.blocks = shared + self.pool.take(missing)
        if not sequence.num_preemptions:
            sequence.cached_tokens = cached
        if cached and not sequence.hand_off:
            before = sequence.pending_prompt_tokens
            sequence.adopt(cached, self.pool)
            self.pending_prompt_tokens -= before - sequence.pending_prompt_tokens
        return count

    def _preempt(self, sequence: Sequence) -> None:
        before = sequence.pending_prompt_tokens
        self.pool.give_back(sequence.blocks)
        sequence.reset()
        self.pending_prompt_tokens += sequence.pending_prompt_tokens - before
        sequence.state = State.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(sequence)
        self._window.put_back()

    def _end_load(self, sequence: Sequence) -> None:
        self._loading.remove(sequence)
        sequence.hand_off = None
        self._loaded.append(sequence)

    def _retire(self, sequence: Sequence, hold: bool) -> None:
        sequence.state = State.FINISHED
        if hold:
            self._held[sequence.request.id] = sequence.blocks
        else:
            self.pool.give_back(sequence.blocks)
            sequence.blocks = []

    def _publish(self, sequence: Sequence, start: int) -> None:
        """Offer the blocks that became full since `start` tokens to later prompts."""
        size = self.pool.block_size
        first, last = start // size, sequence.num_computed // size
        if first == last or not self.limits.prefix_caching:
            return
        keys = sequence.block_keys(last, size)
        for index in range(first, last):
            self.pool.publish(sequence.blocks[index], keys[index])


def _lengths(sequence: Sequence) -> Lengths:
    return Lengths(sequence.prompt_len, sequence.num_outputs, sequence.request.max_tokens)


def _tokens_to_compute(sequence: Sequence) -> int:
    return 1 if sequence.hand_off else len(sequence.tokens)
