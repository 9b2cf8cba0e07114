"""Aladdin's Algorithm 2: what moving placed requests gains, with the lengths of ShareGPT.

Called by run.py. Decode workers whose iterations take what Eq. 3 says; requests arrive with their
prompts computed, are placed by best fit under (b) and (e), and begin with the next heartbeat.
Algorithm 2 may move them until then: it counts the error of each worker (requests that outran
their prediction, and those that ended before it) in ms of an iteration, and moves new requests so
that the sum of these errors falls. The scheduler knows the tokens generated so far. What is hard:
the errors that Algorithm 2 corrects can also be left out of the load at once, as Cleave's
accounting does, so both are measured, alone and together.
"""

import bisect
import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fleets import Worker
from traces import predict

from cleave.perf.published.aladdin import Coefficients
from cleave.policy import best_fit
from cleave.policy.best_fit import BestFitModel
from cleave.policy.output_length import estimate_remaining
from cleave.traffic import published

HEARTBEAT_MS = 100.0
MAX_TOKENS = 4096
"""Longest context of the models here."""
MAX_WORKERS = 256
WARM_UP = 0.2
SEED = 1
SHARES = 1.0, 0.99
"""Of the requests, that keep the target."""


@dataclass(slots=True, eq=False)
class Request:
    arrival_ms: float
    prompt: int
    output: int
    predicted: float
    joined_ms: float = 0.0
    end_ms: float = 0.0
    first_step: int = 0
    is_counted: bool = True
    """Whether it arrived after the warm-up."""


@dataclass(slots=True)
class DecodeWorker:
    """Running requests; each step generates a token of each."""

    now_ms: float = 0.0
    step: int = 0
    context: int = 0
    running: dict[Request, None] = field(default_factory=dict)
    ends: list[tuple[int, int, Request]] = field(default_factory=list)
    placed: list[Request] = field(default_factory=list)
    """Requests that begin with the next heartbeat."""
    early: list[tuple[float, float]] = field(default_factory=list)
    """(step in which it was expected to end, predicted minus real tokens) of requests that ended
    early."""

    def count_generated(self, request: Request) -> int:
        return self.step - request.first_step


@dataclass(frozen=True, slots=True)
class Row:
    """Fewest workers at one rate; 0: no number is enough."""

    worker: str
    rate: float
    share: float
    workers: dict[str, int]
    """By way to count running requests, and with moves or without."""


WAYS = {
    "by predictions": (True, False, False),
    "by predictions, moves": (True, False, True),
    "by tokens held": (True, True, False),
    "by tokens held, moves": (True, True, True),
    "pending tokens": (False, True, False),
}
"""Whether the fullest worker that fits is chosen, not the one with the fewest tokens; whether
requests that outrun their prediction count with what they hold; whether requests move. The first is
Aladdin without re-balancing, the second with it, the third Cleave's best fit."""


class Fleet:
    """A number of workers under one way to place requests."""

    def __init__(
        self, worker: Worker, count: int, tpot_ms: float, packs: bool, holds: bool, moves: bool
    ) -> None:
        self.model = BestFitModel(worker.coefficients, float("inf"), tpot_ms)
        self.capacity = worker.estimate.kv_capacity_tokens
        self.workers = [DecodeWorker() for _ in range(count)]
        self.packs, self.holds, self.moves = packs, holds, moves
        self.missed = 0
        """Counted requests that missed the target so far."""

    def serve(self, requests: list[Request], may_miss: float = math.inf) -> None:
        """Run until all requests have ended, or more than `may_miss` have missed the target: a
        fleet that is too small has ever more requests in flight, and takes long to simulate."""
        beat_ms, at = HEARTBEAT_MS, 0
        while self.missed <= may_miss and (
            at < len(requests) or any(each.running or each.placed for each in self.workers)
        ):
            while at < len(requests) and requests[at].arrival_ms <= beat_ms:
                self._place(requests[at])
                at += 1
            if self.moves:
                self._rebalance()
            for worker in self.workers:
                self._run(worker, beat_ms)
            beat_ms += HEARTBEAT_MS

    def _run(self, worker: DecodeWorker, until_ms: float) -> None:
        """Iterations up to the heartbeat; then what was placed begins, as far as its KV fits."""
        fit = self.model.coefficients
        while worker.running and worker.now_ms < until_ms:
            worker.now_ms += fit.predict_decode_ms(len(worker.running), worker.context)
            worker.step += 1
            worker.context += len(worker.running)
            while worker.ends and worker.ends[0][0] <= worker.step:
                self._end(worker, heapq.heappop(worker.ends)[2])
        worker.now_ms = max(worker.now_ms, until_ms)
        while worker.placed and worker.context + worker.placed[0].prompt <= self.capacity:
            request = worker.placed.pop(0)
            request.joined_ms, request.first_step = worker.now_ms, worker.step
            worker.context += request.prompt
            worker.running[request] = None
            if request.joined_ms - request.arrival_ms > HEARTBEAT_MS + 2 * self.model.tpot_ms:
                self.missed += request.is_counted
                request.is_counted = False
            heapq.heappush(worker.ends, (worker.step + request.output, id(request), request))

    def _end(self, worker: DecodeWorker, request: Request) -> None:
        del worker.running[request]
        worker.context -= request.prompt + request.output
        request.end_ms = worker.now_ms
        if request.end_ms - request.joined_ms > self.model.tpot_ms * request.output:
            self.missed += request.is_counted
        if request.output < request.predicted:
            expected = request.first_step + request.predicted
            bisect.insort(worker.early, (expected, request.predicted - request.output))

    def _place(self, request: Request) -> None:
        """Best fit, the least context where no worker fits; or the fewest pending tokens."""
        if not self.packs:
            min(self.workers, key=self._count_pending).placed.append(request)
            return
        order = sorted(self.workers, key=self._measure_norm, reverse=True)
        chosen = next((each for each in order if self._fits(each, request)), None)
        (chosen or min(self.workers, key=self._measure_context)).placed.append(request)

    def _rebalance(self) -> None:
        """Algorithm 2, a request at a time: from the worker with the largest error to the one with
        the least that fits it, if that lowers the sum of errors."""
        fit = self.model.coefficients
        errors = [self._measure_error_ms(worker) for worker in self.workers]
        for source in sorted(range(len(errors)), key=errors.__getitem__, reverse=True):
            for request in list(self.workers[source].placed):
                added_ms = fit.k2 * request.predicted + fit.c2
                for target in sorted(range(len(errors)), key=errors.__getitem__):
                    before = abs(errors[source]) + abs(errors[target])
                    after = abs(errors[source] - added_ms) + abs(errors[target] + added_ms)
                    if target == source or after >= before:
                        break
                    if self._fits(self.workers[target], request):
                        self.workers[source].placed.remove(request)
                        self.workers[target].placed.append(request)
                        errors[source] -= added_ms
                        errors[target] += added_ms
                        break

    def _measure_error_ms(self, worker: DecodeWorker) -> float:
        """The error of a worker's expected iteration: outrun predictions, less early ends."""
        fit, tokens, count = self.model.coefficients, 0.0, 0
        for request in worker.running:
            if worker.count_generated(request) > request.predicted:
                tokens += request.predicted
                count += 1
        del worker.early[: bisect.bisect_left(worker.early, (worker.step, 0.0))]
        for _, missing in worker.early:
            tokens -= missing
            count -= 1
        return fit.k2 * tokens + fit.c2 * count

    def _measure_norm(self, worker: DecodeWorker) -> float:
        fit = self.model.coefficients
        batch = len(worker.running) + len(worker.placed)
        return best_fit.compute_capacity_norm(batch, self._measure_context(worker), fit.k2, fit.c2)

    def _count_pending(self, worker: DecodeWorker) -> float:
        return sum(each.prompt + each.predicted for each in (*worker.running, *worker.placed))

    def _measure_context(self, worker: DecodeWorker) -> float:
        return sum(self._weigh(worker, each) for each in (*worker.running, *worker.placed))

    def _weigh(self, worker: DecodeWorker, request: Request) -> float:
        prompt, gamma = request.prompt, self.model.gamma
        weight = best_fit.compute_context_weight(prompt, request.predicted, gamma)
        if not self.holds or request not in worker.running:
            return weight
        return best_fit.count_context(weight, prompt + worker.count_generated(request))

    def _fits(self, worker: DecodeWorker, request: Request) -> bool:
        """(b) and (e)."""
        amounts = sorted(((left, held) for held, left in self._list_kv(worker, request)))[::-1]
        left, held = zip(*amounts, strict=True)
        need = best_fit.compute_context_weight(request.prompt, request.predicted, self.model.gamma)
        batch = len(worker.running) + len(worker.placed)
        rest = (float("inf"), 0.0, request.prompt, False, self.capacity, self.model.coefficients)
        context = self._measure_context(worker)
        return best_fit.keeps_running(held, left, batch, context, need, *rest, self.model)

    def _list_kv(self, worker: DecodeWorker, request: Request) -> Iterator[tuple[float, float]]:
        for each in worker.running:
            generated = worker.count_generated(each)
            yield each.prompt + generated, estimate_remaining(each.predicted, generated)
        for each in (*worker.placed, request):
            yield each.prompt, each.predicted


def count_workers(worker: Worker, rate: float, tpot_ms: float, requests: int) -> list[Row]:
    """Fewest workers that keep the target for all requests (P100), and for 99 %."""
    may_miss = {share: int((1 - share) * (1 - WARM_UP) * requests + 1e-6) for share in SHARES}
    known: dict[tuple[str, int], int] = {}

    def holds(way: str, share: float, count: int) -> bool:
        if (way, count) not in known:
            fleet = Fleet(worker, count, tpot_ms, *WAYS[way])
            fleet.serve(draw(rate, requests), max(may_miss.values()))
            known[way, count] = fleet.missed
        return known[way, count] <= may_miss[share]

    least = _count_least(worker.coefficients, tpot_ms, rate, draw(rate, requests))
    return [
        Row(worker.name, rate, share, {way: _find_fewest(way, share, holds, least) for way in WAYS})
        for share in SHARES
    ]


def _count_least(fit: Coefficients, tpot_ms: float, rate: float, requests: list[Request]) -> int:
    """Workers without which iterations of all requests take longer than the target on average
    (Eq. 3, requests in flight by Little's law); a tenth less, since lengths are a sample."""
    sums = sum(
        each.output * (fit.c2 + fit.k2 * (each.prompt + each.output / 2)) for each in requests
    )
    load = rate / 1000 * tpot_ms * sums / len(requests)
    return max(1, int(0.9 * load / (tpot_ms - fit.c3)))


def draw(rate: float, requests: int) -> list[Request]:
    """Poisson arrivals, ShareGPT's lengths, outputs predicted as the router does."""
    demand = published.get_workload("sharegpt").build_demand(rate, 1.0)
    trace = demand.with_max_model_len(MAX_TOKENS).draw(requests, rate, SEED)
    predicted = predict(trace.prompt_tokens, trace.output_tokens)
    columns = (trace.arrival_ms, trace.prompt_tokens, trace.output_tokens, predicted)
    drawn = [Request(*values) for values in zip(*(c.tolist() for c in columns), strict=True)]
    for request in drawn[: int(WARM_UP * requests)]:
        request.is_counted = False
    return drawn


def _find_fewest(
    way: str, share: float, holds: Callable[[str, float, int], bool], least: int
) -> int:
    """The fewest workers from `least` on; 0: not with MAX_WORKERS."""
    low, high = least - 1, least
    while not holds(way, share, high):
        low, high = high, 2 * high
        if high > MAX_WORKERS:
            return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(way, share, middle) else (middle, high)
    return high
