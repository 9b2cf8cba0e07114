"""M/D/1: DistServe's equations, with the simulator and predicted plans beside them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.perf.timing import EngineTiming
from cleave.planner.problem import Problem
from cleave.planner.result import md1
from cleave.planner.result.md1 import QueueingError
from cleave.planner.result.prediction import PredictedPlan, predict
from cleave.planner.search.trials import CONFIRMATION_PRECISION, Trials
from cleave.simulator.fleet import Batching, SimulatedEngine, SimulatedFleet, SimulatedPool
from cleave.simulator.run import simulate
from cleave.traffic import workload

from tests.support import known_problems


def mean_ttft_ms(timing: EngineTiming, rate: float, num: int = 400_000) -> float:
    """Simulated: prompts of 512 tokens, one at a time."""
    engine = SimulatedEngine(
        timing, 10_000_000, batching=Batching.PREFILL_FIRST, max_num_batched_tokens=512
    )
    trace = workload.build_fixed(512, 1, rate).draw(num, rate, 7)
    return float(
        np.mean(simulate(SimulatedFleet(prefill=(SimulatedPool(engine, 1),)), trace).ttft_ms)
    )


def constant(ms: float, stages: int = 1) -> EngineTiming:
    """Every pass takes as long."""
    return EngineTiming(1.0, (ms, ms), 0.0, (ms, ms), (0.0,), stages)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_one_queue_waits_as_eq_1_says(load: float) -> None:
    rate = load * 10
    assert mean_ttft_ms(constant(100), rate) == pytest.approx(
        md1.compute_mean_ttft_ms(rate, 100), rel=0.01
    )


@pytest.mark.parametrize("stages", [2, 4])
def test_pipeline_stages_wait_as_eq_2_says(stages: int) -> None:
    rate = 0.6 * stages * 10
    assert mean_ttft_ms(constant(100, stages), rate) == pytest.approx(
        md1.compute_mean_ttft_ms(rate, 100, stages), rel=0.01
    )


@given(rate=st.floats(0.01, 19.9), prefill_ms=st.floats(1, 100))
def test_eq_2_is_the_papers_formula_for_two_stages(rate: float, prefill_ms: float) -> None:
    load = rate * prefill_ms / 1000
    if load >= 2:
        return
    published = prefill_ms + load * prefill_ms / (4 * (2 - load))
    assert md1.compute_mean_ttft_ms(rate, prefill_ms, 2) == pytest.approx(published)


def test_a_queue_that_never_settles_is_refused() -> None:
    with pytest.raises(QueueingError, match="rate 10 req/s: 100 ms each keep the instance busy"):
        md1.compute_mean_ttft_ms(10, 100)


def test_the_formulas_apply_to_equal_prompts_and_poisson_arrivals_only() -> None:
    def sample(demand: workload.Demand):
        return Trials(demand).build_trace(5000, 5.0)

    assert md1.applies(sample(workload.build_fixed(512, 64, 5)))
    assert not md1.applies(sample(workload.build_fixed(512, 64, 5, burstiness=3)))
    assert not md1.applies(sample(known_problems.chat()))
    assert not md1.applies(Trials(workload.build_fixed(512, 64, 5)).build_trace(50, 5.0))


def predicted(
    problem: Problem, n: int = 1, m: int = 2, size: tuple[int, int] = (1, 1)
) -> PredictedPlan:
    draft = known_problems.split(
        problem, known_problems.of_size(problem, *size), n, known_problems.of_size(problem, 2), m
    )
    search = known_problems.search(problem).with_precision(CONFIRMATION_PRECISION)
    return predict(search, draft, "Algorithm 1")


def test_equal_prompts_on_one_instance_agree_with_the_formula() -> None:
    for size in ((1, 1), (1, 2)):
        finalist = predicted(known_problems.blog(rate=8.0), size=size)
        assert md1.compute_expected_prefill_ms(finalist) is not None
        assert list(md1.list_disagreements(finalist)) == []


def test_a_difference_is_reported_with_both_figures() -> None:
    finalist = predicted(known_problems.blog(rate=8.0))
    late = replace(
        finalist,
        outcome=replace(finalist.outcome, prefill_end_ms=finalist.outcome.prefill_end_ms + 50),
    )
    (disagreement,) = md1.list_disagreements(late)
    assert "by the M/D/1 formula" in disagreement


def test_prompts_of_different_length_or_several_instances_are_not_checked() -> None:
    assert (
        md1.compute_expected_prefill_ms(predicted(known_problems.problem(known_problems.chat(5.0))))
        is None
    )
    assert md1.compute_expected_prefill_ms(predicted(known_problems.blog(rate=8.0), n=2)) is None
