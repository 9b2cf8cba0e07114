"""When checkpoints of KV pay."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.perf.hardware.link import Link, LinkKind
from cleave.perf.recovery import (
    CheckpointSetup,
    RecomputeSetup,
    ResidentLoad,
    compare_recovery,
    compute_resume_cost,
)
from cleave.perf.timing import EngineTiming

TIMING = EngineTiming(1.0, (5.0, 5.1), 1e-6, (10.0, 10.1), (1e-4,))
KEEPING = CheckpointSetup(
    Link(LinkKind.PCIE, 50.0),
    token_bytes=128e3,
    gpus=1,
    block_tokens=16,
    memory_gb_per_s=3350,
)
RESIDENTS = ResidentLoad(streams=64, prompt_tokens=1600, generated_tokens=160, started_per_s=4)
COMPUTING = RecomputeSetup(TIMING, gpus=1, instances=2)


def test_a_stream_is_computed_whole_or_behind_what_is_cached_or_kept() -> None:
    one = compute_resume_cost(TIMING, replace(RESIDENTS, generated_tokens=170), KEEPING)
    assert one.recompute_ms == pytest.approx(5 + 177 + 1770**2 * 1e-6)
    assert one.prefix_cached_ms == pytest.approx(5 + 17 + (1770**2 - 1600**2) * 1e-6)
    restored = KEEPING.link.compute_send_ms(1760 * 128e3)
    assert one.restored_ms == pytest.approx(restored + 5 + 1 + (1770**2 - 1760**2) * 1e-6)


def test_a_context_of_whole_blocks_still_computes_its_last_token() -> None:
    one = compute_resume_cost(TIMING, replace(RESIDENTS, generated_tokens=0), KEEPING)
    assert one.prefix_cached_ms > 5


def test_checkpoints_cost_bandwidth_always_and_save_time_at_a_loss() -> None:
    found = compare_recovery(COMPUTING, RESIDENTS, KEEPING)
    copied = 4 * (1600 + 320) * 128e3
    assert found.link_bytes_per_s == copied
    assert found.link_share == pytest.approx(copied / 36e9)
    assert found.cost_s_per_hour == pytest.approx(3600 * copied / 3350e9)
    saved_ms = found.resume_cost.recompute_ms - found.resume_cost.restored_ms
    assert found.gain_s == pytest.approx(64 * saved_ms / 1e3)
    assert found.host_bytes == 64 * 1760 * 128e3
    assert found.pause_s == pytest.approx(32 * found.resume_cost.recompute_ms / 1e3)


def test_they_pay_for_instances_that_are_lost_more_often_than_the_break_even() -> None:
    found = compare_recovery(COMPUTING, RESIDENTS, KEEPING)
    assert found.cost_s_per_hour * found.break_even_hours == pytest.approx(found.gain_s)


def test_a_link_that_cannot_carry_them_is_used_more_than_fully() -> None:
    thin = replace(KEEPING, link=Link(LinkKind.ETHERNET, 0.5))
    assert compare_recovery(COMPUTING, RESIDENTS, thin).link_share > 1


def test_an_instance_without_streams_gains_nothing() -> None:
    idle = ResidentLoad(streams=0, prompt_tokens=100, generated_tokens=10, started_per_s=0)
    assert compare_recovery(COMPUTING, idle, KEEPING).break_even_hours == 0


@given(
    prompt=st.integers(1, 32_768),
    generated=st.integers(0, 8_192),
    block=st.integers(1, 256),
)
def test_what_is_cached_never_makes_it_dearer(prompt: int, generated: int, block: int) -> None:
    residents = ResidentLoad(1, prompt, generated, 1)
    one = compute_resume_cost(TIMING, residents, replace(KEEPING, block_tokens=block))
    assert 0 < one.prefix_cached_ms <= one.recompute_ms
