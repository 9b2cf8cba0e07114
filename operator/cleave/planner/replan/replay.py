"""Simulates the running plan over the observed time, and counts requests as gateways do.

Called by the model check. What is hard: for a while after a change of traffic the fleet is in
transition, and a steady-state simulation shows other latencies than can have been observed yet. The
simulation therefore begins where the traffic began, as far as that is known, and it counts only
requests that ended within the observed time.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from cleave.api.deployment import Slo
from cleave.perf import latency_correction
from cleave.perf.latency_correction import Correction
from cleave.planner.plan import Plan, PlannedPool
from cleave.planner.pool_simulation import to_candidate_placement
from cleave.planner.problem import Problem
from cleave.planner.search.candidate_placement import CandidatePlacement, build_deployed_cell
from cleave.planner.search.trials import Targets, Trials
from cleave.simulator.outcome import SimulationResult, Times
from cleave.simulator.run import prepare_fleet

_MIN_REQUESTS = 3_000
"""Requests of all simulations together; a short window is simulated several times."""
_MAX_SIMULATIONS = 8
_MAX_REQUESTS = 100_000
"""Most requests of one simulation; with more, a shorter time gives the same accuracy."""


@dataclass(frozen=True, slots=True)
class RunningPlan:
    """The pools that serve now."""

    pools: tuple[PlannedPool, ...]
    algorithm: str = ""
    """The algorithm that found the plan, as in `Plan.algorithm`."""
    whole_below_tokens: int = 0
    """Prompt length up to which gateways let decode instances compute prompts; 0: none."""

    def change_plan(self, plan: Plan) -> Self:
        """Another plan, served by the same gateways."""
        return replace(
            self,
            pools=plan.pools,
            algorithm=plan.algorithm,
            whole_below_tokens=plan.whole_below_tokens,
        )


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedWindow:
    """The simulated requests that ended within the window."""

    ttft_ms: Times
    tpot_ms: Times
    """Of requests with more than one output token."""
    attainment: float
    is_overloaded: bool
    """Whether the median request waits longer than its TTFT target; latencies then depend on how
    long the overload has lasted."""
    is_flipping: bool
    """Whether instances flipped roles; latencies then depend on which were flipped at the time."""
    part: Times
    """Part of the window in which each request of `ttft_ms` ended."""

    @classmethod
    def from_rows(cls, rows: NDArray[np.float64], slo: Slo, is_lending: bool) -> Self:
        """From five rows with one column per request: TTFT, TPOT, waiting time, output tokens, and
        part of the window."""
        ttft_ms, tpot_ms, waited_ms, tokens, part = rows
        if not len(ttft_ms):
            return cls(ttft_ms, tpot_ms, 0.0, True, is_lending, part)
        is_met = (ttft_ms <= slo.ttft_ms) & (tpot_ms <= slo.tpot_ms)
        middle_ms = float(np.median(ttft_ms))
        is_overloaded = middle_ms > slo.ttft_ms and float(np.median(waited_ms)) > middle_ms / 2
        attainment = float(np.mean(is_met))
        return cls(ttft_ms, tpot_ms[tokens > 1], attainment, is_overloaded, is_lending, part)


@dataclass(frozen=True, slots=True)
class ReplayModel:
    """Simulates the running plan with corrected step times."""

    problem: Problem
    """The problem with the observed traffic."""
    running_plan: RunningPlan
    length_s: float
    """Length of the window."""
    lead_s: float = 0.0
    """Time before the window in which traffic and plan were the same."""
    num_parts: int = 1
    """Equal parts of the window whose latencies are compared."""

    def simulate(self, correction: Correction) -> SimulatedWindow:
        """Simulate what gateways would have counted in the window. Raises PlanError."""
        problem = self.build_corrected_problem(correction)
        placement = build_placement(problem, self.running_plan)
        rate = problem.rate / placement.copies
        deployed = build_deployed_cell(problem, placement, self.running_plan.whole_below_tokens)
        fleet = prepare_fleet(deployed)
        length_s = min(self.length_s, _MAX_REQUESTS / rate)
        counted = max(round(rate * length_s), 1)
        lead = min(math.ceil(rate * self.lead_s), counted)
        rows, num_flips = [], 0
        for seed in range(min(-(-_MIN_REQUESTS // counted), _MAX_SIMULATIONS)):
            trials = Trials(problem.demand, seed)
            usual = trials.compute_span(rate, Targets.from_slo(problem.slo))
            span = trials.build_span(max(usual.ramp, lead), counted)
            outcome = trials.simulate(fleet, rate, span)
            num_flips += outcome.num_flips
            start_ms = float(outcome.arrival_ms[span.window.start])
            simulated_s = length_s * span.counted / counted
            selected = _select_window(outcome, start_ms, simulated_s * 1000, self.num_parts)
            selected[-1] += seed * self.num_parts
            rows.append(selected)
        return SimulatedWindow.from_rows(np.concatenate(rows, axis=1), problem.slo, num_flips > 0)

    def build_corrected_problem(self, correction: Correction) -> Problem:
        """The problem with step times multiplied by the factors of `correction`."""
        estimator = latency_correction.apply_correction(self.problem.estimator, correction)
        return replace(self.problem, estimator=estimator)


def predict_attainment(problem: Problem, running_plan: RunningPlan) -> float:
    """Long-run attainment of `running_plan` under the problem's traffic. Raises PlanError."""
    placement = build_placement(problem, running_plan)
    rate, targets = problem.rate / placement.copies, Targets.from_slo(problem.slo)
    trials = Trials(problem.demand, problem.seed)
    fleet = build_deployed_cell(problem, placement, running_plan.whole_below_tokens)
    span = trials.compute_span(rate, targets)
    return trials.measure_shares(fleet, rate, targets, span).both


def build_placement(problem: Problem, running_plan: RunningPlan) -> CandidatePlacement:
    """The pools in the search's type. Raises PlanError."""
    return to_candidate_placement(problem, running_plan.pools, running_plan.algorithm)


def _select_window(
    outcome: SimulationResult, start_ms: float, length_ms: float, num_parts: int
) -> Times:
    end_ms = outcome.end_ms - start_ms
    waited_ms = outcome.prefill_start_ms - outcome.arrival_ms
    waited_ms = waited_ms + outcome.transfer_start_ms - outcome.prefill_end_ms
    part = np.floor(end_ms / length_ms * num_parts)
    rows = np.stack([outcome.ttft_ms, outcome.tpot_ms, waited_ms, outcome.output_tokens, part])
    return np.asarray(rows[:, (end_ms >= 0) & (end_ms < length_ms)], np.float64)
