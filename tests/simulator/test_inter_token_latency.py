"""Times between tokens: stalls behind prompts, preemptions, transfers, and series of passes."""

import math

import numpy as np
import pytest

from cleave.perf.timing import EngineTiming
from cleave.simulator.fleet import Batching, SimulatedEngine, SimulatedFleet, SimulatedPool
from cleave.simulator.inter_token_latency import compute_middles
from cleave.simulator.run import simulate
from cleave.simulator.trace import Trace

from tests.support.fleets import fixed_timing

ALWAYS = (0.0, math.inf)


def list_gaps(
    fleet: SimulatedFleet,
    arrivals: list[float],
    prompts: list[int],
    outputs: list[int],
    window: tuple[float, float] = ALWAYS,
) -> list[float]:
    """Sorted, rounded to ms."""
    trace = Trace(np.array(arrivals), np.array(prompts), np.array(outputs))
    counts = simulate(fleet, trace, itl_window=window).itl.counts
    return np.repeat(compute_middles().round(), counts).tolist()


def mixed(engine: SimulatedEngine) -> SimulatedFleet:
    return SimulatedFleet(mixed=(SimulatedPool(engine, 1),))


@pytest.mark.parametrize("batching", [Batching.VLLM, Batching.PREFILL_FIRST])
def test_a_prompt_that_comes_between_lengthens_one_gap_of_who_decodes(batching: Batching) -> None:
    fleet = mixed(SimulatedEngine(fixed_timing(40.0, 10.0), 1_000, batching=batching))
    # The second prompt waits for an iteration's end and takes 40 ms; the first token is no gap. If
    # it has an iteration of its own, the next one follows before the first gets a token.
    stalled = 40.0 if batching is Batching.VLLM else 50.0
    found = list_gaps(fleet, [0.0, 55.0], [8, 8], [6, 3])
    assert found == [10.0] * 6 + [stalled]


@pytest.mark.parametrize(("decode_ms", "slope"), [(10.0, 0.1), (210.0, -0.1)])
def test_a_series_of_passes_counts_each_of_them_even_if_they_become_longer(
    decode_ms: float, slope: float
) -> None:
    timing = EngineTiming(1.0, (5.0, 5.0), 0.0, (decode_ms, decode_ms), (slope, slope))
    found = list_gaps(mixed(SimulatedEngine(timing, 4_000)), [0.0], [1], [2_000])
    exact = sorted(timing.predict_iteration_ms([], 1, context) for context in range(2, 2_001))
    assert exact[-1] > 10 * exact[0]
    assert found == pytest.approx(exact, abs=2.2)


def test_only_tokens_of_the_window_count_even_of_a_series() -> None:
    fleet = mixed(SimulatedEngine(fixed_timing(10.0, 10.0), 4_000))
    # Tokens come at 10, 20 ... 1,000 ms.
    assert len(list_gaps(fleet, [0.0], [1], [100], (300.0, 600.0))) == 30
    assert len(list_gaps(fleet, [0.0], [1], [100], (295.0, 605.0))) == 31
    assert len(list_gaps(fleet, [0.0], [1], [100], (0.0, 10.0))) == 0
    assert len(list_gaps(fleet, [0.0], [1], [100], (2_000.0, 3_000.0))) == 0


def test_a_gap_spans_preemption_and_computing_again() -> None:
    fleet = mixed(SimulatedEngine(fixed_timing(30.0, 10.0), 32, kv_block_size=1))
    trace = Trace(np.zeros(2), np.array([8, 8]), np.array([16, 16]))
    found = simulate(fleet, trace)
    assert found.num_preemptions.sum() == 1
    assert found.itl.counts.sum() == 30
    longest = compute_middles()[found.itl.counts > 0].max()
    # It waits until the other has ended, and its KV is computed again.
    assert longest > 100.0


def test_the_gap_before_the_second_token_contains_the_transfer_if_prefill_has_sent_the_first() -> (
    None
):
    pool = SimulatedPool(SimulatedEngine(fixed_timing(40.0, 10.0), 1_000), 1)
    split = {"prefill": (pool,), "decode": (pool,), "dispatch_ms": 25.0}
    assert list_gaps(SimulatedFleet(**split), [0.0], [8], [4]) == [10.0] * 3
    early = SimulatedFleet(**split, first_token_by_decode=False)
    assert list_gaps(early, [0.0], [8], [4]) == [10.0, 10.0, 35.0]
