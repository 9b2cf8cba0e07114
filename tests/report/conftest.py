"""A bench that simulates plans with one FCFS queue, and a study made with it."""

from dataclasses import dataclass, fields

import numpy as np
import pytest

from cleave.api.deployment import Slo
from cleave.planner.plan import Plan, PlanningResult
from cleave.report.layout import NodeShape
from cleave.report.load_study import LoadStudy, ReportInput, run_study
from cleave.simulator.inter_token_latency import NUM_BINS
from cleave.simulator.outcome import InstanceStatistics, InterTokenLatencies, SimulationResult

A100 = "A100-SXM-80GB"


@dataclass(frozen=True)
class QueueBench:
    """Latencies of single-server queues whose speed makes the plan's goodput plausible."""

    num_requests: int = 600

    def simulate_plan(self, plan: Plan, rate: float) -> SimulationResult:
        rng = np.random.default_rng(7)
        arrival = np.cumsum(rng.exponential(1000 / rate, self.num_requests))
        output = rng.integers(2, 120, self.num_requests)
        service = 1000 / (1.9 * plan.prediction.goodput) * rng.uniform(0.6, 1.4, self.num_requests)
        start, end, free = np.empty_like(arrival), np.empty_like(arrival), 0.0
        for i, at in enumerate(arrival):
            start[i] = max(at, free)
            free = end[i] = start[i] + service[i]
        moved = end + (4.0 if plan.is_disaggregated else 0.0)
        crowd = 1 + 0.6 * rate / plan.prediction.goodput
        tpot = (16 if plan.is_disaggregated else 21) * crowd * rng.uniform(0.8, 1.2, len(end))
        begun = moved + 3.0
        first = begun + tpot
        zeros = np.zeros(len(end), np.int64)
        return SimulationResult(
            arrival_ms=arrival,
            prefill_start_ms=start,
            prefill_end_ms=end,
            transfer_start_ms=end,
            transfer_end_ms=moved,
            decode_start_ms=begun,
            first_token_ms=first,
            end_ms=first + tpot * (output - 1),
            prompt_tokens=output,
            output_tokens=output,
            num_preemptions=zeros,
            prefill_instance=zeros,
            decode_instance=zeros,
            outcome=zeros,
            cached_tokens=zeros,
            pull_cached_tokens=zeros,
            loaded_tokens=zeros,
            fetched_tokens=zeros,
            source_instance=zeros - 1,
            instances=NO_INSTANCES,
            itl=NO_GAPS,
        )


NO_GAPS = InterTokenLatencies(np.zeros(NUM_BINS, np.int64))
NO_INSTANCES = InstanceStatistics(
    **{
        field.name: 0.0 if field.name == "duration_ms" else np.zeros(0)
        for field in fields(InstanceStatistics)
    }
)


@pytest.fixture
def subject() -> ReportInput:
    return ReportInput(
        deployment="chat",
        model="facebook/opt-13b",
        slo=Slo(ttft_ms=400, tpot_ms=40, attainment=0.9),
        rate=5.0,
        traffic="prompts of 512 tokens on average (P90 1,100), answers of 64 (P90 140), Poisson",
        nodes=(NodeShape(A100, 4, 8),),
        max_gpus=32,
        seed=0,
    )


@pytest.fixture
def study(subject: ReportInput, answer: PlanningResult) -> LoadStudy:
    return run_study(subject, answer, QueueBench())


@pytest.fixture
def bench() -> QueueBench:
    return QueueBench()
