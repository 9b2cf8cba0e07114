"""An answer made by hand, and a bench that simulates its plans with one FCFS queue per phase."""

from dataclasses import dataclass

import numpy as np
import pytest

from cleave.api.deployment import Slo
from cleave.api.role import Parallelism, Role
from cleave.perf.trust import Basis, Trust
from cleave.planner.plan import (
    Answer,
    NearestSlo,
    Percentiles,
    Plan,
    PlannedPool,
    Prediction,
    Verdict,
)
from cleave.report.layout import NodeShape
from cleave.report.study import Study, Subject, study
from cleave.simulator.outcome import Instances, Outcome

TRUST = Trust(Basis.FITTED, "DistServe's coefficients, OPT-13B on A100-SXM-80GB", 0.041)
A100 = "A100-SXM-80GB"


def pool(role: Role, replicas: int, tensor: int = 1, pipeline: int = 1) -> PlannedPool:
    size = Parallelism(tensor=tensor, pipeline=pipeline)
    return PlannedPool(role, replicas, size, A100, "VLLM", 256, 8192)


def made_plan(goodput: float, *pools: PlannedPool, algorithm: str = "Algorithm 1") -> Plan:
    gpus = sum(each.gpus for each in pools)
    load = 5.0 / goodput
    seen = Prediction(
        goodput=goodput,
        goodput_interval=(goodput * 0.97, goodput * 1.02),
        attainment=min(0.999, 1.06 - 0.1 * load),
        ttft_ms=Percentiles(90 + 40 * load, 160 + 150 * load, 320 + 400 * load),
        tpot_ms=Percentiles(18 + 5 * load, 24 + 9 * load, 33 + 20 * load),
        cost_per_hour=1.8 * gpus,
        power_watts=400.0 * gpus,
        trust=TRUST,
    )
    return Plan(pools, seen, algorithm, goodput / gpus)


DISAGGREGATED = made_plan(
    9.4, pool(Role.PREFILL, 2, 2), pool(Role.DECODE, 1, 2), algorithm="Algorithm 2"
)
COLOCATED = made_plan(5.6, pool(Role.MIXED, 4), algorithm="colocated")
OTHERS = (
    made_plan(6.1, pool(Role.PREFILL, 2), pool(Role.DECODE, 1)),
    COLOCATED,
    made_plan(3.1, pool(Role.PREFILL, 1), pool(Role.DECODE, 1)),
    made_plan(2.6, pool(Role.MIXED, 2), algorithm="colocated"),
    made_plan(11.8, pool(Role.PREFILL, 3, 2), pool(Role.DECODE, 2)),
    made_plan(4.0, pool(Role.MIXED, 2, 2), algorithm="colocated"),
)


@dataclass(frozen=True)
class QueueBench:
    """Latencies of single-server queues whose speed makes the plan's goodput plausible."""

    num_requests: int = 600

    def serve(self, plan: Plan, rate: float) -> Outcome:
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
        return Outcome(
            arrival_ms=arrival,
            prefill_start_ms=start,
            prefill_end_ms=end,
            transfer_start_ms=end,
            transfer_end_ms=moved,
            decode_start_ms=begun,
            first_token_ms=first,
            end_ms=first + tpot * (output - 1),
            output_tokens=output,
            num_preemptions=zeros,
            prefill_instance=zeros,
            decode_instance=zeros,
            instances=NO_INSTANCES,
        )


_NONE = np.zeros(0)
NO_INSTANCES = Instances(
    *(_NONE, _NONE.astype(np.int64), _NONE.astype(np.int64), _NONE.astype(np.int64)),
    *(_NONE, _NONE.astype(np.int64), _NONE.astype(np.int64), 0.0),
)


@pytest.fixture
def subject() -> Subject:
    return Subject(
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
def answer() -> Answer:
    return Answer(
        verdict=Verdict.DISAGGREGATE,
        selected=DISAGGREGATED,
        alternatives=OTHERS,
        reason="Two prefill instances of tensor size 2 and one decode instance carry 1.57 req/s "
        "per GPU, 12 % more than the best colocated plan.",
        what_would_change="The runner-up, 2P tp1 + 1D tp1, has 2.03 req/s per GPU but misses 400 "
        "ms TTFT at 5 req/s; a TTFT of 450 ms would make it the choice.",
        nearest_slo=None,
        warnings=("Prompt lengths vary strongly: replaying the trace is safer than its fit.",),
        num_candidates=96,
        num_simulated_requests=2_400_000,
        elapsed_s=0.94,
    )


@pytest.fixture
def infeasible(answer: Answer) -> Answer:
    return Answer(
        verdict=Verdict.INFEASIBLE,
        selected=None,
        alternatives=(),
        reason="No placement on 32 GPUs holds TTFT 20 ms: one prompt alone takes 70 ms.",
        what_would_change="A TTFT target of 180 ms.",
        nearest_slo=NearestSlo(9.0, 180.0, 360.0, "2P tp4 + 1D tp1"),
        warnings=(),
        num_candidates=96,
        num_simulated_requests=400_000,
        elapsed_s=0.3,
    )


@pytest.fixture
def made(subject: Subject, answer: Answer) -> Study:
    return study(subject, answer, QueueBench())


@pytest.fixture
def bench() -> QueueBench:
    return QueueBench()
