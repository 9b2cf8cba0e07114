"""The simulator as the real world, whose passes may be other than the planner's model says."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from cleave.perf.latency_correction import NO_CORRECTION, Correction, apply_correction
from cleave.planner import plan_search
from cleave.planner.problem import Problem
from cleave.planner.replan.replay import RunningPlan, build_fleet, build_placement
from cleave.planner.replan.revision import (
    ReplacedPlan,
    ReplanSettings,
    ReplanVerdict,
    Revision,
    revise,
)
from cleave.simulator.run import simulate
from cleave.traffic.window import TrafficWindow
from cleave.traffic.workload import Demand

from tests.support.emulated_chat import chat
from tests.support.traffic_windows import observe

NUM_REQUESTS = 3_000


def ask(disaggregation: str = "Auto", rate: float = 12.0, **spec) -> Problem:
    """Twice as slow, the SLO can still be met."""
    workload = {
        "rate": rate,
        "promptTokens": {"mean": 600, "p90": 1200},
        "outputTokens": {"mean": 150, "p90": 300},
    }
    stated = {
        "slo": {"ttftMs": 800, "tpotMs": 90},
        "planning": {"disaggregation": disaggregation},
        "workload": workload,
    }
    return chat(**(stated | spec))


@dataclass
class Play:
    """One deployment through virtual time."""

    problem: Problem
    """As it is asked: the model without a correction."""
    truth: Correction = NO_CORRECTION
    """What passes really take, by the model's."""
    terms: ReplanSettings = ReplanSettings(cooldown_s=60)  # noqa: RUF009 - a frozen value
    running: RunningPlan | None = None
    correction: Correction = NO_CORRECTION
    now_s: float = 0.0
    left: list[ReplacedPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.running is None:
            self.running = plan(self.problem)

    def serve(
        self, demand: Demand | None = None, num_requests: int = NUM_REQUESTS
    ) -> list[TrafficWindow]:
        """Windows of some traffic."""
        real = replace(self.problem, estimator=apply_correction(self.problem.estimator, self.truth))
        fleet = build_fleet(real, self.running, build_placement(real, self.running))
        drawn = (demand or self.problem.demand).draw(num_requests, seed=int(self.now_s) + 1)
        windows = observe(drawn, simulate(fleet, drawn), self.problem.slo, self.now_s)
        self.now_s = windows[-1].end_s
        return windows

    def look(self, demand: Demand | None = None) -> Revision:
        """Serve for a while, look at it, and do what was decided."""
        windows = self.serve(demand)
        found = revise(self.problem, self.running, windows, self.correction, self.terms, self.left)
        self.correction = found.assessment.correction
        if found.decision.verdict is ReplanVerdict.APPLY:
            self.left.append(ReplacedPlan(self.running.pools, self.now_s))
            best = found.proposal
            self.running = replace(self.running, pools=best.pools, algorithm=best.algorithm)
        return found

    def look_often(self, times: int, demand: Demand | None = None) -> Iterator[Revision]:
        """Again and again."""
        for _ in range(times):
            yield self.look(demand)


def plan(problem: Problem, correction: Correction = NO_CORRECTION) -> RunningPlan:
    """What the planner makes of it with passes so much longer."""
    mended = replace(problem, estimator=apply_correction(problem.estimator, correction))
    selected = plan_search.plan(mended).selected
    assert selected is not None
    return RunningPlan(selected.pools, selected.algorithm)


def count(running: RunningPlan) -> dict[str, int]:
    """Instances by role."""
    return {str(pool.role): pool.replicas for pool in running.pools}
