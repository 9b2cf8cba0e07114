"""Queueing delay of each way to choose an instance, beside a bound that knows everything.

Called by run.py. Instances compute one prompt after another, first come first served; gateways
choose at arrival, from their own books and what instances report each 100 ms. The choices are made
by the functions of `cleave.policy.dispatch` that the router calls, compiled. What is hard: a
gateway must know no more than it would: its own requests from dispatch to answer, everybody's from
the latest report, and lengths as estimates.
"""

import heapq
import math
from dataclasses import dataclass
from enum import IntEnum
from types import FunctionType

import numba
import numpy as np
from numpy.typing import NDArray

from cleave.policy import dispatch, queue_model

REPORT_MS = float(queue_model.INTERVAL_MS)
WARM_UP = 0.2
"""Share of the requests that fills the queues and is not counted."""
TIE = dispatch.TIE_WEIGHT


class Way(IntEnum):
    """How a gateway chooses."""

    BOUND = 0
    """Least remaining work, known exactly, the same to all gateways."""
    RANDOM = 1
    ROUND_ROBIN = 2
    LEAST_REQUESTS = 3
    PENDING_TOKENS = 4
    POWER_OF_TWO = 5
    """The less pending of two drawn ones."""
    EARLIEST = 6
    """The one whose prompt queue is predicted to be through first."""
    BY_TOKENS = 7
    """The same, with all of a prompt's time taken for its tokens'."""
    HOME = 8
    """Earliest, own share of the instances first: each is home to one gateway."""


@dataclass(frozen=True, slots=True)
class Load:
    """What arrives."""

    arrival_ms: NDArray[np.float64]
    service_ms: NDArray[np.float64]
    tokens: NDArray[np.float64]
    """As a gateway estimates them."""


@dataclass(frozen=True, slots=True)
class Delay:
    """Of the requests after the warm-up, in ms."""

    mean: float
    p99: float


def draw_load(
    prompt_tokens: NDArray[np.int64],
    *,
    instances: int,
    utilisation: float,
    requests: int,
    seed: int,
    error: float = 0.0,
    fixed_ms: float = 10.0,
    token_ms: float = 0.1,
) -> Load:
    """Poisson arrivals with lengths drawn from `prompt_tokens`; the same for every way.

    `error`: spread (sigma of the logarithm) of what gateways take the lengths for.
    """
    rng = np.random.default_rng(seed)
    tokens = rng.choice(prompt_tokens, requests).astype(np.float64)
    service = fixed_ms + token_ms * tokens
    gap = service.mean() / instances / utilisation
    arrival = np.cumsum(rng.exponential(gap, requests))
    return Load(arrival, service, tokens * np.exp(rng.normal(0.0, error, requests)))


def measure(load: Load, *, instances: int, gateways: int, way: Way, seed: int) -> Delay:
    """Delay of `load` when each request comes to one of the gateways at random."""
    rng = np.random.default_rng(seed + 1)
    waits = serve(
        load.arrival_ms,
        load.service_ms,
        load.tokens,
        rng.integers(0, gateways, len(load.tokens)),
        np.sort(rng.uniform(0.0, REPORT_MS, instances)),
        gateways,
        int(way),
        seed * 7919 + 12_345,
    )
    counted = waits[int(WARM_UP * len(waits)) :]
    return Delay(float(counted.mean()), float(np.percentile(counted, 99)))


def _compile(function, **names):
    """A compiled copy of a policy's function, with compiled copies of what it calls."""
    own = {**function.__globals__, **names}
    return numba.njit(FunctionType(function.__code__, own, function.__name__))


_find_least = _compile(dispatch.find_least)
_prefers_remote = _compile(dispatch.prefers_remote)
_find_at_home = _compile(
    dispatch.prefer_own, find_least=_find_least, prefers_remote=_prefers_remote
)
_draw = _compile(dispatch.draw)
_find_sampled = _compile(dispatch.sample_least, find_least=_find_least, draw=_draw)
_predict_end_ms = _compile(queue_model.predict_end_ms)
_add_answer = _compile(queue_model.add_completion)
_fit_line = _compile(queue_model.fit_prompt_times)
_PROMPT_MS, _TOKEN_MS, _SAFE_MS, _SUMS = 0, 1, 2, 3
"""What a gateway has learnt of an instance."""


@numba.njit(cache=False)
def _learn(learnt, tokens, ms, way):
    """As `queue_model.PrefillQueueModel` does."""
    a, b, c, d, e, f, g, h, i = learnt[_SUMS:]
    sums = _add_answer((a, b, c, d, e, f, g, h, i), tokens, ms)
    for at in range(len(sums)):
        learnt[_SUMS + at] = sums[at]
    if way == Way.BY_TOKENS:
        learnt[_TOKEN_MS] = learnt[_SAFE_MS] = sums[4] / sums[2]
    else:
        learnt[_PROMPT_MS], learnt[_TOKEN_MS], learnt[_SAFE_MS] = _fit_line(sums)


@numba.njit(cache=False)
def _score(way, own, others, sent, since, learnt, turn):
    tie = turn * TIE
    if way == Way.ROUND_ROBIN:
        return float(turn)
    pending = own + others
    if way < Way.EARLIEST:
        return pending + tie
    prompts = sent + others * learnt[_SUMS + 1] / learnt[_SUMS + 2]
    return _predict_end_ms(pending, prompts, since, learnt[_PROMPT_MS], learnt[_SAFE_MS], tie)


@numba.njit(cache=False)
def serve(arrival, service, tokens, gateway, phases, gateways, way, seed):
    """Wait of each request in ms. `phases`: when each instance reports first, ascending."""
    count, total = len(phases), len(arrival)
    free_at = np.zeros(count)
    waits = np.zeros(total)
    chosen = np.zeros(total, np.int64)
    # Amounts are tokens, or requests where these are what counts.
    amounts = np.ones(total) if way == Way.LEAST_REQUESTS else tokens
    own = np.zeros((gateways, count))
    sent = np.zeros((gateways, count))
    others = np.zeros((gateways, count))
    since = np.zeros((gateways, count))
    turns = np.zeros((gateways, count), np.int64)
    turn = np.zeros(gateways, np.int64)
    away = np.zeros((gateways, count), np.bool_)
    scores = np.zeros((gateways, count))
    learnt = np.zeros((gateways, count, 12))
    for at, value in enumerate(queue_model.DEFAULT_SUMS):
        learnt[:, :, _SUMS + at] = value
    learnt[:, :, _TOKEN_MS:_SUMS] = queue_model.DEFAULT_TOKEN_MS
    for g in range(gateways):
        for i in range(count):
            # Gateways that start together must not all begin with the first instance.
            turns[g, i] = (i + g * count // gateways) % count
            away[g, i] = i % gateways != g
            scores[g, i] = _score(way, 0.0, 0.0, 0.0, 0.0, learnt[g, i], turns[g, i])
        turn[g] = count
    ends = [(math.inf, 0)]
    report_round, reporter = 0.0, 0
    for r in range(total):
        now = arrival[r]
        while True:
            end, ended = ends[0]
            report = phases[reporter] + report_round * REPORT_MS if gateways > 1 else math.inf
            if min(end, report) > now:
                break
            if end <= report:
                heapq.heappop(ends)
                g, i = gateway[ended], chosen[ended]
                own[g, i] -= amounts[ended]
                sent[g, i] -= 1.0
                if others[g, i] < 0.5:
                    _learn(learnt[g, i], tokens[ended], end - since[g, i], way)
                since[g, i] = end
                scores[g, i] = _score(
                    way, own[g, i], others[g, i], sent[g, i], end, learnt[g, i], turns[g, i]
                )
                continue
            i = reporter
            outstanding = own[:, i].sum()
            for g in range(gateways):
                others[g, i] = max(outstanding - own[g, i], 0.0)
                if own[g, i] < 0.5:
                    since[g, i] = report
                scores[g, i] = _score(
                    way,
                    own[g, i],
                    others[g, i],
                    sent[g, i],
                    since[g, i],
                    learnt[g, i],
                    turns[g, i],
                )
            reporter += 1
            if reporter == count:
                reporter, report_round = 0, report_round + 1.0
        g = gateway[r]
        if way == Way.BOUND:
            i = _find_least(np.maximum(free_at - now, 0.0))
        elif way == Way.RANDOM:
            i, seed = _find_sampled(scores[g], 1, seed)
        elif way == Way.POWER_OF_TWO:
            i, seed = _find_sampled(scores[g], 2, seed)
        elif way == Way.HOME and gateways > 1:
            one = learnt[g, _find_least(scores[g])]
            worth_ms = one[_PROMPT_MS] + tokens[r] * one[_TOKEN_MS]
            i = _find_at_home(scores[g], away[g], worth_ms, now)
        else:
            i = _find_least(scores[g])
        chosen[r] = i
        start = max(free_at[i], now)
        waits[r] = start - now
        free_at[i] = start + service[r]
        heapq.heappush(ends, (free_at[i], r))
        if own[g, i] + others[g, i] < 0.5:
            since[g, i] = now
        own[g, i] += amounts[r]
        sent[g, i] += 1.0
        turn[g] += 1
        turns[g, i] = turn[g]
        scores[g, i] = _score(
            way, own[g, i], others[g, i], sent[g, i], since[g, i], learnt[g, i], turns[g, i]
        )
    return waits
