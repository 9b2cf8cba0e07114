"""Fixtures for all tests: planning results with fixed numbers, a fake clock, HTTP servers."""

import math
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from hypothesis import settings

from cleave.api.role import Parallelism, Role
from cleave.perf.estimate import Confidence, LatencySource
from cleave.planner.plan import (
    NearestSlo,
    Percentiles,
    Plan,
    PlannedPool,
    PlanningResult,
    PlanVerdict,
    Prediction,
)

from tests.support.doubles import Answering, Clock
from tests.support.pytest_hooks import pytest_collection as pytest_collection
from tests.support.pytest_hooks import pytest_sessionfinish as pytest_sessionfinish

# A busy machine is slow, not wrong. Inputs are the same in each run, so a change is judged by what
# it changed.
settings.register_profile("cleave", deadline=None, max_examples=50, derandomize=True)
# pytest --hypothesis-profile=long PATH runs more examples, which differ from run to run.
settings.register_profile("long", deadline=None, max_examples=20_000)
settings.load_profile("cleave")

TRUST = Confidence(
    LatencySource.MEASURED, "DistServe's coefficients, OPT-13B on A100-SXM-80GB", 0.041
)
A100 = "A100-SXM-80GB"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def serve() -> AsyncIterator[Answering]:
    async with Answering() as start:
        yield start


def pool(role: Role, replicas: int, tensor: int = 1, pipeline: int = 1) -> PlannedPool:
    size = Parallelism(tensor=tensor, pipeline=pipeline)
    return PlannedPool(role, replicas, size, A100, "VLLM", 256, 8192)


def build_plan(goodput: float, *pools: PlannedPool, algorithm: str = "Algorithm 1") -> Plan:
    gpus = sum(each.gpus for each in pools)
    load = 5.0 / goodput
    prediction = Prediction(
        goodput=goodput,
        goodput_interval=(goodput * 0.97, goodput * 1.02),
        attainment=min(0.999, 1.06 - 0.1 * load),
        ttft_ms=Percentiles(90 + 40 * load, 160 + 150 * load, 320 + 400 * load),
        tpot_ms=Percentiles(18 + 5 * load, 24 + 9 * load, 33 + 20 * load),
        itl_ms=Percentiles(17 + 4 * load, 30 + 9 * load, 60 + 30 * load),
        cost_per_hour=1.8 * gpus,
        power_watts=400.0 * gpus,
        trust=TRUST,
    )
    return Plan(pools, prediction, algorithm, min(goodput, 5.0) / gpus)


def overloaded(plan: Plan) -> Plan:
    """The plan with a P99 of TTFT that is infinite: the slowest requests never end."""
    endless = Percentiles(380.0, 9000.0, math.inf)
    return replace(plan, prediction=replace(plan.prediction, ttft_ms=endless, attainment=0.55))


DISAGGREGATED = build_plan(
    9.4, pool(Role.PREFILL, 2, 2), pool(Role.DECODE, 1, 2), algorithm="Algorithm 2"
)
COLOCATED = build_plan(5.6, pool(Role.MIXED, 4), algorithm="colocated")
OTHERS = (
    COLOCATED,
    build_plan(6.1, pool(Role.PREFILL, 3), pool(Role.DECODE, 3)),
    build_plan(3.1, pool(Role.PREFILL, 1), pool(Role.DECODE, 1)),
    build_plan(2.6, pool(Role.MIXED, 2), algorithm="colocated"),
    build_plan(11.8, pool(Role.PREFILL, 3, 2), pool(Role.DECODE, 2)),
    overloaded(build_plan(4.0, pool(Role.MIXED, 2, 2), algorithm="colocated")),
)


@pytest.fixture
def answer() -> PlanningResult:
    return PlanningResult(
        verdict=PlanVerdict.DISAGGREGATE,
        selected=DISAGGREGATED,
        alternatives=OTHERS,
        reason="Two prefill instances of tensor size 2 and one decode instance carry 1.57 req/s "
        "per GPU, 12 % more than the best colocated plan.",
        what_would_change="The runner-up, 4M tp1, has 1.40 req/s per GPU; a TPOT "
        "target of 55 ms would make it the choice.",
        nearest_slo=None,
        warnings=("Prompt lengths vary strongly: replaying the trace is safer than its fit.",),
        num_candidates=96,
        num_simulated_requests=2_400_000,
        elapsed_s=0.94,
    )


@pytest.fixture
def infeasible(answer: PlanningResult) -> PlanningResult:
    return PlanningResult(
        verdict=PlanVerdict.INFEASIBLE,
        selected=None,
        alternatives=(),
        reason="infeasible: no plan meets TTFT 20 ms; nearest SLO that holds is TTFT 180 ms",
        what_would_change="an SLO 9 times as long would make it feasible",
        nearest_slo=NearestSlo(9.0, 180.0, 360.0, None, "2P tp4 + 1D tp1"),
        warnings=(),
        num_candidates=96,
        num_simulated_requests=400_000,
        elapsed_s=0.3,
    )
