"""The simulator in place of a real fleet, with iteration times that may differ from the model."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from cleave.api.role import Role
from cleave.perf.latency_correction import NO_CORRECTION, Correction, apply_correction
from cleave.planner import plan_search
from cleave.planner.plan import EMULATED_GPU, PlannedPool
from cleave.planner.problem import Problem
from cleave.planner.replan.replay import RunningPlan, build_placement
from cleave.planner.replan.revision import (
    ReplacedPlan,
    ReplanSettings,
    ReplanVerdict,
    Revision,
    revise,
)
from cleave.planner.search.candidate_placement import build_deployed_cell
from cleave.simulator.run import simulate
from cleave.traffic.window import TrafficWindow
from cleave.traffic.workload import Demand

from tests.support.emulated_chat import chat
from tests.support.traffic_windows import observe

MIN_REQUESTS, MIN_S = 3_000, 250.0
FLIPPING = {"flipping": "Auto"}
TWO_PAIRS = RunningPlan(
    (
        PlannedPool(
            Role.PREFILL, 2, gpu=EMULATED_GPU, batching="VLLM", max_num_batched_tokens=8192
        ),
        PlannedPool(Role.DECODE, 2, gpu=EMULATED_GPU, batching="VLLM", max_num_seqs=1024),
    ),
    "Algorithm 1",
    whole_below_tokens=512,
)
"""Larger than the plan for `ask("Always")`: full at 18 req/s; decode instances take short prompts.
"""


def ask(disaggregation: str = "Auto", rate: float = 12.0, **spec) -> Problem:
    """A problem with an SLO that can still be met if iterations take twice as long; with fixed
    roles by default."""
    workload = {
        "rate": rate,
        "promptTokens": {"mean": 600, "p90": 1200},
        "outputTokens": {"mean": 150, "p90": 300},
    }
    defaults = {
        "slo": {"ttftMs": 800, "tpotMs": 90},
        "planning": {"disaggregation": disaggregation},
        "workload": workload,
        "pools": {"flipping": "Off"},
    }
    return chat(**(defaults | spec))


@dataclass
class Play:
    """One deployment in virtual time."""

    problem: Problem
    """The problem with the uncorrected model."""
    truth: Correction = NO_CORRECTION
    """Actual iteration times relative to the model's."""
    terms: ReplanSettings = ReplanSettings(cooldown_s=60)  # noqa: RUF009 - a frozen value
    running: RunningPlan | None = None
    correction: Correction = NO_CORRECTION
    now_s: float = 0.0
    left: list[ReplacedPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.running is None:
            self.running = plan(self.problem)

    def serve(self, demand: Demand | None = None) -> list[TrafficWindow]:
        """Simulate requests for some minutes; return their traffic windows."""
        real = replace(self.problem, estimator=apply_correction(self.problem.estimator, self.truth))
        placement = build_placement(real, self.running)
        fleet = build_deployed_cell(real, placement, self.running.whole_below_tokens)
        demand = demand or self.problem.demand
        num_requests = max(MIN_REQUESTS, round(MIN_S * demand.rate))
        drawn = demand.draw(num_requests, seed=int(self.now_s) + 1)
        windows = observe(drawn, simulate(fleet, drawn), self.problem.slo, self.now_s)
        self.now_s = windows[-1].end_s
        return windows

    def look(self, demand: Demand | None = None) -> Revision:
        """Serve requests, revise the plan, and apply the decision."""
        windows = self.serve(demand)
        revision = revise(
            self.problem, self.running, windows, self.correction, self.terms, self.left
        )
        self.correction = revision.assessment.correction
        if revision.decision.verdict is ReplanVerdict.APPLY:
            self.left.append(ReplacedPlan(self.running.pools, self.now_s))
            self.running = self.running.change_plan(revision.proposal)
        return revision

    def look_often(self, times: int, demand: Demand | None = None) -> Iterator[Revision]:
        """Call `look` several times."""
        for _ in range(times):
            yield self.look(demand)


def plan(problem: Problem, correction: Correction = NO_CORRECTION) -> RunningPlan:
    """The selected plan, with iteration times multiplied by `correction`."""
    corrected = replace(problem, estimator=apply_correction(problem.estimator, correction))
    selected = plan_search.plan(corrected).selected
    assert selected is not None
    return RunningPlan(selected.pools).change_plan(selected)


def count(running: RunningPlan) -> dict[str, int]:
    """Instances by role."""
    return {str(pool.role): pool.replicas for pool in running.pools}
