"""The five stages of a request's life."""

import math
from dataclasses import fields

import numpy as np
import pytest

from cleave.simulator.inter_token_latency import NUM_BINS, compute_middles
from cleave.simulator.outcome import (
    InstanceStatistics,
    InterTokenLatencies,
    LatencyStage,
    SimulationResult,
    compute_stage_ms,
    compute_stage_shares,
)

NO_INSTANCES = InstanceStatistics(
    **{field.name: np.zeros(0) for field in fields(InstanceStatistics)}
)
NO_GAPS = InterTokenLatencies(np.zeros(NUM_BINS, np.int64))
TIMES = {
    "arrival_ms": [0.0, 10.0],
    "prefill_start_ms": [5.0, 20.0],
    "prefill_end_ms": [25.0, 40.0],
    "transfer_start_ms": [30.0, math.nan],
    "transfer_end_ms": [31.0, math.nan],
    "decode_start_ms": [34.0, math.nan],
    "first_token_ms": [50.0, math.nan],
    "end_ms": [100.0, math.nan],
}


def outcome(times=TIMES) -> SimulationResult:
    counts = {
        field.name: np.ones(2, np.int64)
        for field in fields(SimulationResult)
        if field.name not in (*times, "instances", "itl")
    }
    arrays = {name: np.array(values) for name, values in times.items()}
    return SimulationResult(**arrays, **counts, instances=NO_INSTANCES, itl=NO_GAPS)


def test_the_stages_of_a_request_add_up_to_its_time() -> None:
    stages = {stage: ms[0] for stage, ms in compute_stage_ms(outcome()).items()}
    assert stages == {
        LatencyStage.PREFILL_QUEUE: 5.0,
        LatencyStage.PREFILL: 20.0,
        LatencyStage.TRANSFER: 1.0,
        LatencyStage.DECODE_QUEUE: 5.0 + 3.0,
        LatencyStage.DECODE: 66.0,
    }
    assert sum(stages.values()) == 100.0


def test_requests_that_never_end_count_in_no_stage() -> None:
    assert compute_stage_shares(outcome()) == pytest.approx(
        dict(zip(LatencyStage, (0.05, 0.20, 0.01, 0.08, 0.66), strict=True))
    )


def test_a_quantile_of_gaps_is_the_middle_of_its_bin() -> None:
    middles, counts = compute_middles(), np.zeros(NUM_BINS, np.int64)
    short, long = (int(np.searchsorted(middles, ms)) for ms in (10.0, 80.0))
    counts[short], counts[long] = 99, 1
    gaps = InterTokenLatencies(counts)
    assert gaps.compute_quantile(0.99) == pytest.approx(10.0, rel=0.008)
    assert gaps.compute_quantile(0.991) == pytest.approx(80.0, rel=0.008)
    assert NO_GAPS.compute_quantile(0.99) == 0.0


def test_without_any_end_there_are_no_shares() -> None:
    never = {**TIMES, "end_ms": [math.nan, math.nan]}
    assert set(compute_stage_shares(outcome(never)).values()) == {0.0}
