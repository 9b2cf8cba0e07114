"""Whether the planner is right about what runs, and what mends its model where it is not. Pure.

Called with every look at the traffic, before a plan is made anew: a plan must not rest on a model
that is wrong about the fleet that can be seen (Aladdin, section 5.1: continuous update). What is
hard: near saturation the smallest error of a model is a large one of the TTFT, so an error counts
only if passes a little longer or shorter do not explain it; and the passes of both phases show in
latencies that contain queues. So the correction is sought by simulation: the one with which the
same fleet under the same traffic shows what was seen, decode by the time per token, prefill by the
time to the first one.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from cleave.api.role import Role
from cleave.perf import corrected
from cleave.perf.corrected import NONE, Correction
from cleave.planner.problem import Problem
from cleave.planner.replay import Model, Running, Shown, find_attainment
from cleave.simulator.outcome import Times
from cleave.traffic.counts import Buckets
from cleave.traffic.window import Window, join, list_settled

FEWEST = 100
"""Answers below which nothing is said of a prediction."""
SETTLE_S = 60.0
"""So long after a change latencies are of before and after it."""
THRESHOLD = 0.3
"""Relative error beyond which a prediction does not hold."""
_SLACK = 0.1
"""What passes may be off by without the model being wrong."""
_STEP = 3.0
"""Most that one correction changes passes by."""
_GENTLE = 0.3
"""Share of a correction that is made where the prediction holds."""
_CLOSE = 0.02
"""Corrections that differ by less are the same."""
_SURPRISE = 0.2
"""Attainment beyond the predicted one that nothing but too slow a model explains."""
_HALVINGS = 8
_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure, predicted and observed."""

    name: str
    predicted: float
    observed: float
    is_beyond: bool
    """The model is wrong about it."""
    is_judged: bool = True
    """False: it may be off whatever the model is worth."""

    def excused(self) -> "Comparison":
        """The same, not judged."""
        return replace(self, is_beyond=False, is_judged=False)

    @property
    def error(self) -> float:
        """Of the prediction: 0.5 where half as much again was observed."""
        return self.observed / self.predicted - 1 if self.predicted else math.inf

    def __str__(self) -> str:
        return f"{self.name} {self.observed:.0f} ms where {self.predicted:.0f} ms were predicted"


@dataclass(frozen=True, slots=True)
class Judgement:
    """Of the model, by what runs."""

    comparisons: tuple[Comparison, ...]
    """TTFT and TPOT, median and 90th percentile; empty: too little was seen."""
    attainment: float
    """Predicted for as long as was looked at; where that is not judged, in the long run."""
    correction: Correction
    """To plan with from now on."""

    @property
    def holds(self) -> bool:
        """Whether the prediction may be acted upon; too little to judge by is no fault of it."""
        return not any(each.is_beyond for each in self.comparisons)

    @property
    def error(self) -> float | None:
        """The largest, by amount; None: nothing was judged."""
        assessed = (each.error for each in self.comparisons if each.is_judged)
        return max(assessed, key=abs, default=None)

    @property
    def reason(self) -> str:
        """One sentence."""
        if not self.comparisons:
            return "too few answers to judge the prediction by"
        if self.error is None:
            return "latencies depend on when just now, and tell nothing of the prediction"
        if self.holds:
            return f"the prediction holds within {abs(self.error):.0%}"
        worst = max(self.comparisons, key=lambda each: (each.is_beyond, abs(each.error)))
        return f"the prediction does not hold: {worst}; passes {self.correction}"


def judge(
    problem: Problem,
    running_plan: Running,
    windows: Sequence[Window],
    correction: Correction = NONE,
    threshold: float = THRESHOLD,
    settle_s: float = SETTLE_S,
) -> Judgement:
    """Compare what `running_plan` did in `windows` with what the model says, and correct that.

    `problem` states their traffic, and the model as it is without a correction; `correction` is
    the one in force. Raises PlanError when the pools cannot be simulated.
    """
    settled = list_settled(windows, settle_s)
    observed = join(settled) if settled else Window(0.0, 0.0, 0.0)
    model = Model(problem, running_plan, observed.length_s)
    is_enough = min(observed.ttft.num, observed.tpot.num) >= FEWEST
    expected = model.show(correction) if is_enough else None
    if expected is None or len(expected.tpot_ms) < FEWEST:
        return Judgement((), find_attainment(model.corrected(correction), running_plan), correction)
    faster = model.show(correction.times(1 - _SLACK))
    slower = model.show(correction.times(1 + _SLACK))
    comparisons = tuple(_compare(observed, expected, faster, slower, threshold))
    long_run = find_attainment(model.corrected(correction), running_plan)
    is_better = (observed.attainment or 0.0) > expected.attainment + _SURPRISE
    if expected.is_lending or _fails(long_run, observed, problem.slo.attainment):
        comparisons = tuple(
            each if is_better and each.error < 0 else each.excused() for each in comparisons
        )
        if not any(each.is_judged for each in comparisons):
            return Judgement(comparisons, expected.attainment, correction)
    if expected.is_overloaded and _is_late(model, observed):
        comparisons = tuple(
            each if each.name.endswith("TPOT") else each.excused() for each in comparisons
        )
    fitted = _seek(model, observed, correction)
    weight = 1.0 if is_better or any(each.is_beyond for each in comparisons) else _GENTLE
    return Judgement(comparisons, expected.attainment, _step(correction, fitted, weight, observed))


def _fails(long_run: float, observed: Window, target: float) -> bool:
    """Whether what runs fails badly by both: how badly depends on since when."""
    return long_run < target / 2 and (observed.attainment or 0.0) < target


def _compare(
    observed: Window, expected: Shown, faster: Shown, slower: Shown, threshold: float
) -> Iterable[Comparison]:
    """Through the same buckets: the quantiles of both sides are then coarse alike."""
    for name, buckets, times in (
        ("TTFT", observed.ttft, [each.ttft_ms for each in (expected, faster, slower)]),
        ("TPOT", observed.tpot, [each.tpot_ms for each in (expected, faster, slower)]),
    ):
        foreseen = [Buckets.of((each / 1000).tolist(), buckets.bounds) for each in times]
        for quantile in (0.5, 0.9):
            middle, low, high = (each.find_quantile_ms(quantile) or 0.0 for each in foreseen)
            observed_ms = buckets.find_quantile_ms(quantile) or 0.0
            is_beyond = not low / (1 + threshold) <= observed_ms <= high * (1 + threshold)
            yield Comparison(f"P{quantile * 100:.0f} {name}", middle, observed_ms, is_beyond)


def _seek(model: Model, observed: Window, start: Correction) -> Correction:
    """The correction with which the model shows what was seen, one step from `start` at most."""
    tpot_s, middle = observed.tpot.mean or 0.0, _find_middle(observed.ttft)
    # Where both phases share passes, the time per token says as much of the one as of the other.
    is_disaggregated = any(pool.role is Role.DECODE for pool in model.running.pools)
    ratio = start.prefill / start.decode
    fitted = start
    for _ in range(_ROUNDS):
        prefill = fitted.prefill

        def slow_tokens(
            factor: float, prefill: float = prefill, ratio: float = ratio
        ) -> Correction:
            shared = corrected.bound(factor * ratio)
            return replace(start, decode=factor, prefill=prefill if is_disaggregated else shared)

        def slow_prompts(factor: float, decode: float) -> Correction:
            return replace(start, decode=decode, prefill=factor)

        fitted = _solve(
            slow_tokens,
            lambda candidate: _mean_s(model.show(candidate).tpot_ms),
            start.decode,
            tpot_s,
        )
        simulated = model.show(fitted)
        if simulated.is_overloaded and _is_late(model, observed):
            # How long queues are tells since when it is overloaded, and nothing of passes.
            break
        fitted = _solve(
            partial(slow_prompts, decode=fitted.decode),
            lambda candidate: _middle_of(model.show(candidate), observed),
            start.prefill,
            middle,
        )
        ratio = fitted.prefill / fitted.decode
    return fitted


def _is_late(model: Model, observed: Window) -> bool:
    return (observed.ttft_p50_ms or 0.0) > model.problem.slo.ttft_ms


def _solve(
    make: Callable[[float], Correction],
    show: Callable[[Correction], float],
    start: float,
    target: float,
) -> Correction:
    """Bisection in the logarithm: longer passes never show shorter times."""
    low, high = (math.log(corrected.bound(each)) for each in (start / _STEP, start * _STEP))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if show(make(math.exp(middle))) < target:
            low = middle
        else:
            high = middle
    return make(math.exp((low + high) / 2))


def _step(start: Correction, fitted: Correction, weight: float, observed: Window) -> Correction:
    def move(old: float, new: float) -> float:
        part = (new / old) ** weight
        return old if abs(part - 1) < _CLOSE else float(f"{old * part:.4g}")

    prefill, decode = move(start.prefill, fitted.prefill), move(start.decode, fitted.decode)
    if (prefill, decode) == (start.prefill, start.decode):
        return start
    return Correction(prefill, decode, start.num_requests + round(observed.ttft.num))


def _middle_of(foreseen: Shown, observed: Window) -> float:
    return _find_middle(Buckets.of((foreseen.ttft_ms / 1000).tolist(), observed.ttft.bounds))


def _find_middle(buckets: Buckets) -> float:
    """Mean of the logarithms, each value at the upper end of its bucket.

    A few that wait for ever move it little, and unlike a quantile it moves with every part of the
    distribution, so that it is not stuck inside a bucket.
    """
    if not buckets.num:
        return math.inf
    total, below, highest = 0.0, 0.0, buckets.bounds[-2]
    for bound, count in zip(buckets.bounds, buckets.counts, strict=True):
        total += (count - below) * math.log(min(bound, 2 * highest))
        below = count
    return total / below


def _mean_s(times_ms: Times) -> float:
    # Where nothing ends in time, passes are too long.
    return float(np.mean(times_ms)) / 1000 if len(times_ms) else math.inf
