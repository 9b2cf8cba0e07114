"""A closed loop of clients over predicted iterations, as the load generators of the runs are.

InferenceX starts as many clients as a run has requests at a time. All send their first request
together, and each sends the next one when it has the answer, ten requests for each client
(`--request-rate inf --max-concurrency N --num-prompts 10N --ignore-eos`); lengths are even from 0.8
of the nominal ones on (`--random-range-ratio 0.8`). Times are means over all requests. What is
hard: where KV has no room for all clients, requests wait or are computed again.
"""

import bisect
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from cleave.perf.timing import EngineTiming, PromptChunk

REQUESTS_PER_CLIENT = 10


@dataclass(frozen=True)
class Load:
    """What the clients send, and how the engine takes it."""

    clients: int
    prompt_tokens: int
    output_tokens: int
    shortest: float
    """Lengths are drawn evenly from this share of the nominal ones on."""
    batched_tokens: int
    """Of the largest iteration."""
    kv_tokens: int
    """Room for KV."""


@dataclass(eq=False)
class _Request:
    sent_ms: float
    prompt_tokens: int
    output_tokens: int
    computed: int = 0
    generated: int = 0
    first_ms: float = 0.0

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.generated


class ClosedLoop:
    """One run. Prompts run in chunks beside decoding requests, first come first served."""

    def __init__(self, timing: EngineTiming, load: Load, front_end_ms: float) -> None:
        """A request reaches the engine after `front_end_ms`, as in the planner's simulation."""
        self._timing = timing
        self._load = load
        self._front_end_ms = front_end_ms
        self._random = random.Random(0)
        self._now = self._scheduled_ms = front_end_ms
        """`_scheduled_ms`: when the next iteration was scheduled, if there was anything to do."""
        self._left = load.clients * (REQUESTS_PER_CLIENT - 1)
        self._requests = [self._arrive(0.0) for _ in range(load.clients)]
        """Without a token since they were sent or lost their KV, the oldest first."""
        self._decoding: list[_Request] = []
        self._ttft: list[float] = []
        self._tpot: list[float] = []

    def run(self) -> tuple[float, float]:
        """(mean time to first token, mean time per output token) in ms."""
        while self._requests or self._decoding:
            self._step()
        return statistics.mean(self._ttft), statistics.mean(self._tpot)

    def _arrive(self, sent_ms: float) -> _Request:
        nominal = (self._load.prompt_tokens, self._load.output_tokens)
        lengths = (self._random.randint(int(n * self._load.shortest), n) for n in nominal)
        return _Request(sent_ms, *lengths)

    def _reaches_by(self, request: _Request, ms: float) -> bool:
        return request.sent_ms + self._front_end_ms <= ms

    def _step(self) -> None:
        """One iteration with prompts, or as many without as nothing else happens in."""
        is_ahead = self._timing.schedules_ahead
        self._preempt()
        decoding = self._decoding
        if not is_ahead or not (
            decoding or self._reaches_by(self._requests[0], self._scheduled_ms)
        ):
            self._scheduled_ms = self._now
        waiting = [each for each in self._requests if self._reaches_by(each, self._scheduled_ms)]
        self._scheduled_ms = self._now
        chunks, completed = self._take_chunks(waiting)
        context = sum(each.context for each in decoding)
        if chunks:
            self._now += self._timing.predict_iteration_ms(chunks, len(decoding), context)
            self._finish(1, completed)
        elif decoding:
            next_ms = self._requests[0].sent_ms if self._requests and not waiting else math.inf
            until = next_ms + self._front_end_ms
            most = min(each.output_tokens - each.generated for each in decoding)
            most = max(min(most, self._count_free() // len(decoding)), 1)
            count, ms, last_ms = sum_decode_ms(
                self._timing, len(decoding), context, most, until - self._now, int(is_ahead)
            )
            self._scheduled_ms = self._now + ms - last_ms
            self._now += ms
            self._finish(count, [])
        else:
            self._now = self._scheduled_ms = self._requests[0].sent_ms + self._front_end_ms

    def _count_free(self) -> int:
        held = sum(each.context for each in self._decoding)
        return self._load.kv_tokens - held - sum(each.computed for each in self._requests)

    def _preempt(self) -> None:
        """The last requests lose their KV until all others have room for a token."""
        while len(self._decoding) > 1 and self._count_free() < len(self._decoding):
            last = self._decoding.pop()
            last.computed = 0
            self._requests.insert(0, last)

    def _take_chunks(self, waiting: Sequence[_Request]) -> tuple[list[PromptChunk], list[_Request]]:
        """The chunks of an iteration, and the requests whose prompts they complete."""
        chunks: list[PromptChunk] = []
        completed: list[_Request] = []
        budget = self._load.batched_tokens - len(self._decoding)
        free = self._count_free() - len(self._decoding)
        for request in waiting:
            count = min(budget, request.context - request.computed)
            is_alone = not (self._decoding or chunks)
            if count <= 0 or (count > free and not is_alone):
                break
            chunks.append(PromptChunk(request.computed, request.computed + count))
            request.computed += count
            budget, free = budget - count, free - count
            if request.computed == request.context:
                completed.append(request)
        return chunks, completed

    def _finish(self, count: int, completed: Sequence[_Request]) -> None:
        """Ends `count` iterations, the last of which `completed` prompts."""
        for each in self._decoding:
            each.generated += count
        for each in completed:
            each.generated += 1
            each.computed = 0
            if not each.first_ms:
                each.first_ms = self._now
                self._ttft.append(self._now - each.sent_ms)
            self._requests.remove(each)
        ends = [each for each in self._decoding if each.generated >= each.output_tokens]
        self._decoding = [each for each in self._decoding if each not in ends] + list(completed)
        for each in ends:
            self._tpot.append((self._now - each.first_ms) / (each.output_tokens - 1))
            if self._left > 0:
                self._requests.append(self._arrive(self._now))
                self._left -= 1


def sum_decode_ms(
    timing: EngineTiming, batch: int, context: int, most: int, until_ms: float, ahead: int
) -> tuple[int, float, float]:
    """(number, ms, ms of the last) of decode iterations from a sum of contexts of `context` on:
    `most`, or as many as start before `until_ms` and `ahead` more. Each is longer than the one
    before by the same time."""
    first = timing.predict_decode_ms(batch, context)
    growth = timing.predict_decode_ms(batch, context + batch) - first

    def total(count: int) -> float:
        return count * first + growth * count * (count - 1) / 2

    count = bisect.bisect_left(range(most), until_ms, key=total) + ahead
    count = min(max(count, 1), most)
    return count, total(count), first + growth * (count - 1)
