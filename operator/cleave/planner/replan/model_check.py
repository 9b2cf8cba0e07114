"""Checks the planner's model against the running plan, and corrects the model. Pure.

Called for every review of the traffic, before replanning: a plan must not be based on a model that
is wrong about the running fleet (Aladdin, section 5.1: continuous update). What is hard: near
saturation a small error of the step times is a large one of the TTFT, so an error counts only if
slightly longer or shorter steps do not explain it; and latencies contain queueing, so the step
times of both phases cannot be read from them. The correction is therefore found by simulation: it
is the one with which the same fleet under the same traffic shows the observed latencies, decode by
the time per token, prefill by the time to the first token. Near saturation decode instances are
full for some tens of seconds and free again, by chance, and the TTFT of such times says nothing of
prompts. So the TTFT is that of a usual part of the observation: the median of parts.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from cleave.api.role import Role
from cleave.perf import latency_correction
from cleave.perf.latency_correction import NO_CORRECTION, Correction
from cleave.planner.problem import Problem
from cleave.planner.replan import replay
from cleave.planner.replan.replay import ReplayModel, RunningPlan, SimulatedWindow
from cleave.simulator.outcome import Times
from cleave.traffic.counters import Buckets
from cleave.traffic.window import TrafficWindow, join_windows, list_settled

MIN_RESPONSES = 100
"""With fewer responses, a prediction is not assessed."""
SETTLE_S = 60.0
"""For this long after a change, latencies still contain requests from before it."""
ERROR_THRESHOLD = 0.3
"""Relative error above which a prediction is rejected."""
_TIMING_SLACK = 0.1
"""Error of step times that is tolerated."""
_MAX_FACTOR = 3.0
"""Largest factor by which one correction changes step times."""
_PARTIAL_WEIGHT = 0.3
"""Share of the fitted correction that is applied where the prediction holds."""
_MIN_CHANGE = 0.02
"""Relative changes of a correction below this are ignored."""
_ATTAINMENT_MARGIN = 0.2
"""Observed attainment this far above the predicted one means that the model is too slow."""
_MAX_FLEX_SHARE = 0.02
"""Tokens of the tier flex, relative to all others, up to which latencies are those of the model."""
_BISECTION_STEPS = 8
_ITERATIONS = 2


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure, predicted and observed."""

    name: str
    predicted: float
    observed: float
    exceeds_threshold: bool
    """Whether the error is above the threshold, so that the model is wrong."""
    is_assessed: bool = True
    """False: the error says nothing about the model, for example under overload."""

    def exclude(self) -> "Comparison":
        """A copy that is not assessed."""
        return replace(self, exceeds_threshold=False, is_assessed=False)

    @property
    def error(self) -> float:
        """Relative to the prediction: 0.5 where 1.5 times the predicted value was observed."""
        return self.observed / self.predicted - 1 if self.predicted else math.inf

    def __str__(self) -> str:
        return f"{self.name} {self.observed:.0f} ms where {self.predicted:.0f} ms were predicted"


@dataclass(frozen=True, slots=True)
class ModelAssessment:
    """Assessment of the model by the running plan."""

    comparisons: tuple[Comparison, ...]
    """TTFT and TPOT, median and 90th percentile; empty: too few responses."""
    attainment: float
    """Predicted over the observed time; where nothing was assessed, the long-run prediction."""
    correction: Correction
    """The correction to plan with from now on."""
    is_shared: bool = False
    """Whether requests that fill idle capacity ran as well, so that nothing was assessed."""

    @property
    def holds(self) -> bool:
        """Whether the prediction may be used; True if there are too few responses to assess it."""
        return not any(each.exceeds_threshold for each in self.comparisons)

    @property
    def error(self) -> float | None:
        """The largest by amount; None: nothing was assessed."""
        assessed = (each.error for each in self.comparisons if each.is_assessed)
        return max(assessed, key=abs, default=None)

    @property
    def reason(self) -> str:
        """One sentence for status."""
        if self.is_shared:
            return "requests of the tier flex share the engines, so the prediction is not assessed"
        if not self.comparisons:
            return "too few responses to assess the prediction"
        if self.error is None:
            return "latencies are changing, so the prediction is not assessed"
        if self.holds:
            return f"the prediction holds within {abs(self.error):.0%}"
        worst = max(self.comparisons, key=lambda each: (each.exceeds_threshold, abs(each.error)))
        return f"the prediction does not hold: {worst}; step times {self.correction}"


def assess(
    problem: Problem,
    running_plan: RunningPlan,
    windows: Sequence[TrafficWindow],
    correction: Correction = NO_CORRECTION,
    threshold: float = ERROR_THRESHOLD,
    settle_s: float = SETTLE_S,
) -> ModelAssessment:
    """Compare the latencies of `running_plan` in `windows` with the model, and correct the model.

    `problem` has the traffic of the windows and the uncorrected model; `correction` is the current
    one. 1. Simulate the fleet over the settled windows, also with slightly faster and slower steps.
    2. Compare quantiles, leaving out those that only depend on how long an overload lasts. 3. Fit a
    correction and apply it in full if the model is wrong, else in part. Raises PlanError when the
    pools cannot be simulated.
    """
    settled = list_settled(windows, settle_s)
    observed = join_windows(settled) if settled else TrafficWindow(0.0, 0.0, 0.0)
    parts = _cut_into_parts(settled)
    lead_s = settled[0].start_s - windows[0].start_s if settled else 0.0
    model = ReplayModel(problem, running_plan, observed.length_s, lead_s, len(parts))
    is_enough = min(observed.ttft.num, observed.tpot.num) >= MIN_RESPONSES
    is_shared = observed.flex_share > _MAX_FLEX_SHARE
    expected = model.simulate(correction) if is_enough and not is_shared else None
    long_run = replay.predict_attainment(model.build_corrected_problem(correction), running_plan)
    if expected is None or len(expected.tpot_ms) < MIN_RESPONSES:
        return ModelAssessment((), long_run, correction, is_shared)
    faster = model.simulate(correction.scale(1 - _TIMING_SLACK))
    slower = model.simulate(correction.scale(1 + _TIMING_SLACK))
    found = tuple(_compare(observed, expected, faster, slower, threshold))
    is_better = (observed.attainment or 0.0) > expected.attainment + _ATTAINMENT_MARGIN
    if expected.is_flipping or _misses_badly(long_run, observed, problem.slo.attainment):
        found = tuple(each if is_better and each.error < 0 else each.exclude() for each in found)
        if not any(each.is_assessed for each in found):
            return ModelAssessment(found, expected.attainment, correction)
    if expected.is_overloaded and _is_late(model, observed):
        found = tuple(each if each.name.endswith("TPOT") else each.exclude() for each in found)
    shares_steps = expected.is_flipping or all(p.role is Role.MIXED for p in running_plan.pools)
    fitted = _fit_correction(model, observed, parts, correction, shares_steps)
    is_wrong = is_better or any(each.exceeds_threshold for each in found)
    weight = 1.0 if is_wrong else _PARTIAL_WEIGHT
    corrected = _apply_correction(correction, fitted, weight, observed)
    return ModelAssessment(found, expected.attainment, corrected)


def _misses_badly(long_run: float, observed: TrafficWindow, target: float) -> bool:
    """Whether both prediction and observation miss badly; latencies then depend on the duration."""
    return long_run < target / 2 and (observed.attainment or 0.0) < target


def _compare(
    observed: TrafficWindow,
    expected: SimulatedWindow,
    faster: SimulatedWindow,
    slower: SimulatedWindow,
    threshold: float,
) -> Iterable[Comparison]:
    """Quantiles from equal histogram buckets, so that both sides have the same resolution."""
    for name, buckets, times in (
        ("TTFT", observed.ttft, [each.ttft_ms for each in (expected, faster, slower)]),
        ("TPOT", observed.tpot, [each.tpot_ms for each in (expected, faster, slower)]),
    ):
        predicted = [Buckets.from_values((each / 1000).tolist(), buckets.bounds) for each in times]
        for quantile in (0.5, 0.9):
            middle, low, high = (each.compute_quantile_ms(quantile) or 0.0 for each in predicted)
            observed_ms = buckets.compute_quantile_ms(quantile) or 0.0
            is_beyond = not low / (1 + threshold) <= observed_ms <= high * (1 + threshold)
            yield Comparison(f"P{quantile * 100:.0f} {name}", middle, observed_ms, is_beyond)


def _cut_into_parts(windows: Sequence[TrafficWindow]) -> list[TrafficWindow]:
    """Joined until each has enough responses to show a TTFT; all together where there are few."""
    parts: list[TrafficWindow] = []
    for window in windows:
        if parts and parts[-1].ttft.num < MIN_RESPONSES:
            parts[-1] = join_windows([parts[-1], window])
        else:
            parts.append(window)
    if len(parts) > 1 and parts[-1].ttft.num < MIN_RESPONSES:
        parts[-2:] = [join_windows(parts[-2:])]
    return parts


def _fit_correction(
    model: ReplayModel,
    observed: TrafficWindow,
    parts: Sequence[TrafficWindow],
    start: Correction,
    shares_steps: bool,
) -> Correction:
    """The correction with which simulation and observation match, at most one step from `start`.

    With `shares_steps`, most iterations compute both phases. The time per token then depends on
    both factors, so they scale together before prefill is fitted alone.
    """
    tpot_s, middle = observed.tpot.mean or 0.0, _compute_usual_center(each.ttft for each in parts)
    ratio = start.prefill / start.decode
    fitted = start
    for _ in range(_ITERATIONS):

        def scale_decode(
            factor: float, prefill: float = fitted.prefill, ratio: float = ratio
        ) -> Correction:
            shared = latency_correction.clamp_factor(factor * ratio)
            return replace(start, decode=factor, prefill=shared if shares_steps else prefill)

        fitted = _bisect(
            scale_decode,
            lambda candidate: _compute_mean_s(model.simulate(candidate).tpot_ms),
            start.decode,
            tpot_s,
        )
        simulated = model.simulate(fitted)
        if simulated.is_overloaded and _is_late(model, observed):
            # Under overload the queue length depends on its duration, not on step times.
            break
        fitted = _bisect(
            partial(_replace_prefill, fitted),
            lambda candidate: _compute_ttft_center(model.simulate(candidate), observed),
            start.prefill,
            middle,
        )
        ratio = fitted.prefill / fitted.decode
    return fitted


def _replace_prefill(correction: Correction, factor: float) -> Correction:
    return replace(correction, prefill=factor)


def _is_late(model: ReplayModel, observed: TrafficWindow) -> bool:
    return (observed.ttft_p50_ms or 0.0) > model.problem.slo.ttft_ms


def _bisect(
    make: Callable[[float], Correction],
    show: Callable[[Correction], float],
    start: float,
    target: float,
) -> Correction:
    """Bisection on a logarithmic scale; `show` grows with the factor given to `make`."""
    low = math.log(latency_correction.clamp_factor(start / _MAX_FACTOR))
    high = math.log(latency_correction.clamp_factor(start * _MAX_FACTOR))
    for _ in range(_BISECTION_STEPS):
        middle = (low + high) / 2
        if show(make(math.exp(middle))) < target:
            low = middle
        else:
            high = middle
    return make(math.exp((low + high) / 2))


def _apply_correction(
    start: Correction, fitted: Correction, weight: float, observed: TrafficWindow
) -> Correction:
    def move(old: float, new: float) -> float:
        part = (new / old) ** weight
        return old if abs(part - 1) < _MIN_CHANGE else float(f"{old * part:.4g}")

    prefill, decode = move(start.prefill, fitted.prefill), move(start.decode, fitted.decode)
    if (prefill, decode) == (start.prefill, start.decode):
        return start
    return Correction(prefill, decode, start.num_requests + round(observed.ttft.num))


def _compute_ttft_center(simulated: SimulatedWindow, observed: TrafficWindow) -> float:
    order = np.argsort(simulated.part, kind="stable")
    starts = np.flatnonzero(np.diff(simulated.part[order])) + 1
    parts = np.split(simulated.ttft_ms[order] / 1000, starts)
    bounds = observed.ttft.bounds
    return _compute_usual_center(Buckets.from_values(each.tolist(), bounds) for each in parts)


def _compute_usual_center(parts: Iterable[Buckets]) -> float:
    """The median part's mean of logarithms."""
    return float(np.median([_compute_log_center(each) for each in parts]))


def _compute_log_center(buckets: Buckets) -> float:
    """Mean of the logarithms, each value taken at the upper bound of its bucket.

    A few very long waits change it little; unlike a quantile it changes with every part of the
    distribution, so that it is not stuck inside a bucket.
    """
    if not buckets.num:
        return math.inf
    total, below, highest = 0.0, 0.0, buckets.bounds[-2]
    for bound, count in zip(buckets.bounds, buckets.counts, strict=True):
        total += (count - below) * math.log(min(bound, 2 * highest))
        below = count
    return total / below


def _compute_mean_s(times_ms: Times) -> float:
    # No request ended in time, so steps are too long.
    return float(np.mean(times_ms)) / 1000 if len(times_ms) else math.inf
