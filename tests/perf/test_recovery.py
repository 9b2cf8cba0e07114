"""What a lost instance costs."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.perf.recovery import ResidentLoad, compute_recovery_cost
from cleave.perf.timing import EngineTiming

TIMING = EngineTiming(1.0, (5.0, 5.1), 1e-6, (10.0, 10.1), (1e-4,))
RESIDENTS = ResidentLoad(streams=64, prompt_tokens=1600, generated_tokens=160)


def test_a_stream_is_computed_whole_or_behind_what_is_cached() -> None:
    cost = compute_recovery_cost(TIMING, 2, replace(RESIDENTS, generated_tokens=170), 16)
    assert cost.recompute_ms == pytest.approx(5 + 177 + 1770**2 * 1e-6)
    assert cost.prefix_cached_ms == pytest.approx(5 + 17 + (1770**2 - 1600**2) * 1e-6)


def test_a_context_of_whole_blocks_still_computes_its_last_token() -> None:
    cost = compute_recovery_cost(TIMING, 2, replace(RESIDENTS, generated_tokens=0), 16)
    assert cost.prefix_cached_ms > 5


def test_all_instances_that_compute_prompts_share_the_streams() -> None:
    cost = compute_recovery_cost(TIMING, 2, RESIDENTS, 16)
    assert cost.pause_s == pytest.approx(32 * cost.recompute_ms / 1e3)


def test_an_instance_without_streams_costs_no_pause() -> None:
    idle = ResidentLoad(streams=0, prompt_tokens=100, generated_tokens=10)
    assert compute_recovery_cost(TIMING, 2, idle, 16).pause_s == 0


@given(
    prompt=st.integers(1, 32_768),
    generated=st.integers(0, 8_192),
    block=st.integers(1, 256),
)
def test_what_is_cached_never_makes_it_dearer(prompt: int, generated: int, block: int) -> None:
    cost = compute_recovery_cost(TIMING, 1, ResidentLoad(1, prompt, generated), block)
    assert 0 < cost.prefix_cached_ms <= cost.recompute_ms
