"""What runs, simulated for as long as it was seen, and counted as gateways count. For the guard.

What is hard: after a change of traffic a fleet is in between for a while, and then a steady
simulation shows other latencies than can have been seen yet. So it begins, as far as is known,
where the traffic began: with a fleet that has just filled, and with the requests that ended in
time alone.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from cleave.api.deployment import Slo
from cleave.perf import corrected
from cleave.perf.corrected import Correction
from cleave.planner.bench import to_draft
from cleave.planner.draft import Draft, cell_fleet
from cleave.planner.plan import PlannedPool
from cleave.planner.problem import Problem
from cleave.planner.trials import Span, Targets, Trials
from cleave.policy.pooling import Terms
from cleave.simulator.fleet import Fleet
from cleave.simulator.outcome import Outcome, Times
from cleave.simulator.run import prepare

_ENOUGH = 3_000
"""Requests, of several simulations where one has too few."""
_MOST_TIMES = 8
_MOST = 100_000
"""Of one simulation: with more at a time, a shorter one tells as much."""


@dataclass(frozen=True, slots=True)
class Running:
    """What serves now."""

    pools: tuple[PlannedPool, ...]
    algorithm: str = ""
    """How it was found, as in its plan."""
    flipping: Terms | None = None
    """What its pool manager goes by; None: there is none."""


@dataclass(frozen=True, slots=True, eq=False)
class Shown:
    """The requests that would have ended in the window."""

    ttft_ms: Times
    tpot_ms: Times
    """Of those with more than one token."""
    attainment: float
    is_overloaded: bool
    """The median one waits past its target: how long depends on since when."""
    is_lending: bool
    """Pools lend each other instances: latencies depend on which are lent just then."""

    @classmethod
    def of(cls, rows: NDArray[np.float64], slo: Slo, is_lending: bool) -> Self:
        """`rows`: TTFT, TPOT, waiting, tokens, one column for each request."""
        ttft_ms, tpot_ms, waited_ms, tokens = rows
        if not len(ttft_ms):
            return cls(ttft_ms, tpot_ms, 0.0, True, is_lending)
        is_met = (ttft_ms <= slo.ttft_ms) & (tpot_ms <= slo.tpot_ms)
        middle_ms = float(np.median(ttft_ms))
        is_overloaded = middle_ms > slo.ttft_ms and float(np.median(waited_ms)) > middle_ms / 2
        attainment = float(np.mean(is_met))
        return cls(ttft_ms, tpot_ms[tokens > 1], attainment, is_overloaded, is_lending)


@dataclass(frozen=True, slots=True)
class Model:
    """Shows what runs with passes of any length."""

    problem: Problem
    """With the traffic that was seen."""
    running: Running
    length_s: float
    """Of the window."""

    def show(self, correction: Correction) -> Shown:
        """What gateways would have counted. Raises PlanError."""
        problem = self.corrected(correction)
        placement = draft_of(problem, self.running)
        rate, fleet = (
            problem.rate / placement.copies,
            prepare(to_fleet(problem, self.running, placement)),
        )
        length_s = min(self.length_s, _MOST / rate)
        counted = max(round(rate * length_s), 1)
        rows, num_flips = [], 0
        for seed in range(min(-(-_ENOUGH // counted), _MOST_TIMES)):
            trials = Trials(problem.demand, seed)
            ramp = trials.span(rate, Targets.of(problem.slo)).ramp
            outcome = trials.serve(fleet, rate, Span(ramp, counted))
            num_flips += outcome.num_flips
            rows.append(_count(outcome, float(outcome.arrival_ms[ramp]), length_s * 1000))
        return Shown.of(np.concatenate(rows, axis=1), problem.slo, num_flips > 0)

    def corrected(self, correction: Correction) -> Problem:
        """The problem with passes of other length."""
        estimator = corrected.correct(self.problem.estimator, correction)
        return replace(self.problem, estimator=estimator)


def find_attainment(problem: Problem, running_plan: Running) -> float:
    """Of what runs, once the problem's traffic has come for long. Raises PlanError."""
    placement = draft_of(problem, running_plan)
    rate, targets = problem.rate / placement.copies, Targets.of(problem.slo)
    trials = Trials(problem.demand, problem.seed)
    span = trials.span(rate, targets)
    return trials.shares(to_fleet(problem, running_plan, placement), rate, targets, span).both


def draft_of(problem: Problem, running_plan: Running) -> Draft:
    """The pools as the search has them. Raises PlanError."""
    return to_draft(problem, running_plan.pools, running_plan.algorithm)


def to_fleet(problem: Problem, running_plan: Running, placement: Draft) -> Fleet:
    """One cell of `placement` as the simulator takes it."""
    return replace(cell_fleet(problem, placement), flipping=running_plan.flipping)


def _count(outcome: Outcome, start_ms: float, length_ms: float) -> NDArray[np.float64]:
    end_ms = outcome.end_ms - start_ms
    waited_ms = outcome.prefill_start_ms - outcome.arrival_ms
    waited_ms = waited_ms + outcome.transfer_start_ms - outcome.prefill_end_ms
    rows = np.stack([outcome.ttft_ms, outcome.tpot_ms, waited_ms, outcome.output_tokens])
    return np.asarray(rows[:, (end_ms >= 0) & (end_ms < length_ms)], np.float64)
