"""Plans that follow a day's traffic, as the operator makes them."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from virtual_fleet import PERIOD_S, VirtualFleet

from cleave.api.workload import Workload
from cleave.controller.replan import drift
from cleave.controller.views import DriftState
from cleave.perf.latency_correction import NO_CORRECTION, Correction
from cleave.planner.plan import PlannedPool
from cleave.planner.problem import Problem
from cleave.planner.replan import replay
from cleave.planner.replan.model_check import SETTLE_S
from cleave.planner.replan.replay import RunningPlan
from cleave.planner.replan.revision import ReplacedPlan, ReplanSettings, ReplanVerdict, revise
from cleave.planner.search.candidate_placement import build_deployed_cell
from cleave.simulator.fleet import SimulatedFleet
from cleave.traffic.refit import RefitError, refit
from cleave.traffic.window import TrafficWindow

START_S = 120.0
"""From a plan to its first request."""
INTERVAL_S = 300.0
SOON = 5
"""A corrected model, and traffic that has just changed, are looked at after such a part of it,
as the operator does."""


@dataclass(frozen=True)
class Step:
    """A plan that took the place of another."""

    seen_s: float
    """When the change of traffic was seen that it answers; without one, when it was decided."""
    decided_s: float
    at_s: float
    """When it was in force."""
    running_plan: RunningPlan


@dataclass(eq=False)
class Follower:
    """Observes a fleet with every window, calls the planner at changes and periodically."""

    problem: Problem
    """With the model as the profile has it."""
    real: Problem
    """With the pass times of the fleet."""
    virtual_fleet: VirtualFleet
    running_plan: RunningPlan
    steps: list[Step] = field(default_factory=list)
    windows: list[TrafficWindow] = field(default_factory=list)
    _left: list[ReplacedPlan] = field(default_factory=list)
    _course: DriftState = DriftState()  # noqa: RUF009 - a frozen value
    _correction: Correction = NO_CORRECTION
    _pending: Step | None = None
    _is_corrected: bool = False
    _settled_s: float = 0.0
    _reviewed_s: float = 0.0

    def follow(self, end_s: float) -> None:
        """Until the day is over."""
        planned_for: Workload | None = None
        for now_s in np.arange(PERIOD_S, end_s, PERIOD_S).tolist():
            self.windows += self.virtual_fleet.look(now_s - PERIOD_S, now_s)
            if self._pending is not None and not self._take_over(now_s):
                continue
            self._course = drift.update(self._course, planned_for, self.windows, self._settled_s)
            if self._is_time(now_s):
                planned_for = self._revise(now_s, planned_for)

    def _take_over(self, now_s: float) -> bool:
        step = self._pending
        if step is None or now_s < step.at_s:
            return False
        self.virtual_fleet.change(to_fleet(self.real, step.running_plan), now_s)
        self.running_plan, self._settled_s, self._pending = step.running_plan, now_s, None
        self.steps.append(step)
        return True

    def _is_time(self, now_s: float) -> bool:
        change, last_s = self._course.change, max(self._reviewed_s, self._settled_s)
        if change and change.detected_s > last_s:
            return True
        is_soon = self._is_corrected or self._course.has_recent_change(now_s, INTERVAL_S)
        late_s = now_s - last_s - INTERVAL_S / (SOON if is_soon else 1)
        return late_s >= 0 and not self._course.should_defer_review(late_s, INTERVAL_S)

    def _revise(self, now_s: float, planned_for: Workload | None) -> Workload | None:
        """Ask the planner; the traffic that is planned for from now on."""
        change, settled_s = self._course.change, self._settled_s
        since_s = drift.find_current_start_s(self.windows, change, settled_s)
        settle_s = drift.find_settle_s(self.windows, change, since_s, SETTLE_S)
        terms = ReplanSettings(start_s=START_S, cooldown_s=INTERVAL_S, settle_s=settle_s)
        recent = drift.list_recent(self.windows, since_s, INTERVAL_S, terms.settle_s)
        try:
            workload = refit(recent)
            found = revise(
                self.problem, self.running_plan, recent, self._correction, terms, self._left
            )
        except RefitError:
            return planned_for
        self._reviewed_s, self._correction = now_s, found.assessment.correction
        decision, best = found.decision, found.proposal
        self._is_corrected = decision.verdict is ReplanVerdict.CORRECT
        print(
            f"  {now_s:6.0f} s  {decision.verdict}: {decision.reason}; {self._correction}",
            file=sys.stderr,
        )
        if decision.verdict is not ReplanVerdict.APPLY or best is None:
            return planned_for or workload
        self._left.append(ReplacedPlan(self.running_plan.pools, now_s))
        running = self.running_plan.change_plan(best)
        seen_s = change.detected_s if change and change.detected_s > self._settled_s else now_s
        self._pending = Step(seen_s, now_s, now_s + START_S, running)
        return workload


def to_fleet(problem: Problem, running: RunningPlan) -> SimulatedFleet:
    """As the simulator takes it."""
    placement = replay.build_placement(problem, running)
    return build_deployed_cell(problem, placement, running.whole_below_tokens)


def gpus(pools: Sequence[PlannedPool]) -> int:
    """Of all pools."""
    return sum(pool.gpus for pool in pools)
