"""Fleets with simdistserve's meaning, against what LLMServe/DistServe at 82831f1 computed."""

import importlib
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import pytest

from cleave.simulator.run import simulate
from cleave.simulator.trace import Trace


@dataclass(frozen=True)
class Recorded:
    backend: str
    prefill: tuple[int, int]
    decode: tuple[int, int]
    ttft_ms: list[float]
    tpot_ms: list[float]


ALONE = Recorded(
    "vllm",
    (1, 1),
    (0, 0),
    [39.19389450766525, 167.33644783445104, 205.83356375692358, 82.93642194335476],
    [107.7028050965841, 43.497499946154804, 58.68934646034853, 26.07662762807437],
)
PAIR = Recorded(
    "distserve",
    (2, 1),
    (1, 1),
    [24.635190162335505, 81.53661427246699, 98.11301235676723, 21.182957996903326],
    [22.04725703885212, 22.666436705162138, 36.494539641647975, 22.47345757053326],
)


def build_case(matched_fleets: ModuleType, recorded: Recorded) -> object:
    return matched_fleets.Case(
        recorded.backend, "opt-13b", recorded.prefill, recorded.decode, 1.0, (200.0, 100.0)
    )


@pytest.mark.parametrize("recorded", [ALONE, PAIR], ids=["colocated", "pair"])
def test_each_request_is_as_fast_as_simdistserve_says(recorded: Recorded) -> None:
    matched_fleets = importlib.import_module("matched_fleets")
    arrivals = np.array([0.0, 30.0, 45.0, 200.0])
    trace = Trace(arrivals, np.array([100, 900, 200, 50]), np.array([3, 5, 1, 8]))
    case = build_case(matched_fleets, recorded)
    outcome = simulate(matched_fleets.to_fleet(case), matched_fleets.to_trace(trace))
    assert outcome.ttft_ms == pytest.approx(recorded.ttft_ms, abs=1e-9)
    assert outcome.tpot_ms == pytest.approx(recorded.tpot_ms, abs=1e-9)
    assert matched_fleets.match(case, outcome) is matched_fleets.Match.EXACT


def test_decoding_beyond_50_000_tokens_is_not_called_exact() -> None:
    matched_fleets = importlib.import_module("matched_fleets")
    case = build_case(matched_fleets, PAIR)
    trace = Trace(np.zeros(40), np.full(40, 1500), np.full(40, 100))
    outcome = simulate(matched_fleets.to_fleet(case), matched_fleets.to_trace(trace))
    assert matched_fleets.match(case, outcome) is matched_fleets.Match.LIMITED
