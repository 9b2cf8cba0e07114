"""Fewest GPUs of mixed instances, as in Aladdin's figure 11."""

from dataclasses import replace

import colocated_savings
import numpy as np
import pytest
from fleets import worker

from cleave.policy.best_fit import BestFitModel
from cleave.simulator.fleet import Batching, DispatchPolicy, SimulatedFleet, SimulatedPool
from cleave.simulator.run import simulate


@pytest.fixture(scope="module")
def small():
    return worker("llama-2-13b", "A100-PCIe-80GB", 1)


def limit(small, ttft_ms: float) -> SimulatedFleet:
    limits = BestFitModel(small.coefficients, ttft_ms, 60.0)
    return SimulatedFleet(dispatch=DispatchPolicy.LEAST_REQUESTS, best_fit=limits)


def test_the_count_is_the_fewest_that_keep_the_targets(small) -> None:
    trace, fleet = colocated_savings.draw(5.0, 200), limit(small, 2_000.0)
    count = colocated_savings.count_workers(fleet, small, Batching.VLLM, trace, 0.9)
    assert count > 1
    shares = []
    for workers in (count - 1, count):
        pool = SimulatedPool(small.engine(Batching.VLLM, 2_048), workers)
        outcome = simulate(replace(fleet, mixed=(pool,)), trace, 1)
        shares.append(np.mean((outcome.ttft_ms <= 2_000) & (outcome.tpot_ms <= 60)))
    assert shares[0] < 0.9 <= shares[1]


def test_no_number_of_workers_computes_a_prompt_faster_than_one(small, monkeypatch) -> None:
    monkeypatch.setattr(colocated_savings, "MAX_WORKERS", 8)
    trace, fleet = colocated_savings.draw(1.0, 50), limit(small, 1.0)
    assert colocated_savings.count_workers(fleet, small, Batching.VLLM, trace, 0.9) == 0
