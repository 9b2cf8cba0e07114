"""Stages, and the prompt that saturates a GPU."""

import pytest

from cleave.perf import named_profiles, pipeline
from cleave.perf.hardware.link import Link, LinkKind
from cleave.perf.model import model_shape

SHAPE = model_shape.load("opt-13b")
NETWORK = Link(LinkKind.INFINIBAND, 25.0, 5.0)
WHOLE = named_profiles.load("distserve/opt-13b/tp1").timing


def test_one_stage_is_the_whole() -> None:
    assert pipeline.cut(WHOLE, SHAPE, 1, NETWORK) is WHOLE


def test_stages_share_the_pass_and_pay_for_their_hops() -> None:
    cut = pipeline.cut(WHOLE, SHAPE, 4, NETWORK)
    hop_ms = NETWORK.send_ms(512 * 5120 * 2)
    assert cut.stages == 4
    assert cut.prefill_ms([512]) == pytest.approx(WHOLE.prefill_ms([512]) + 3 * hop_ms)


def test_layers_that_do_not_divide_make_every_stage_as_slow_as_the_fullest() -> None:
    cut = pipeline.cut(WHOLE, SHAPE, 3, NETWORK)
    hops_ms = 2 * NETWORK.send_ms(5 * 5120 * 2)
    expected = WHOLE.decode_pass_ms(5, 900) * 14 * 3 / 40 + hops_ms
    assert cut.decode_pass_ms(5, 900) == pytest.approx(expected)


def test_each_phase_is_scaled_alone() -> None:
    scaled = pipeline.scaled(WHOLE, prompt=1.3)
    assert scaled.prefill_ms([700, 20]) == pytest.approx(1.3 * WHOLE.prefill_ms([700, 20]))
    assert scaled.decode_pass_ms(5, 900) == WHOLE.decode_pass_ms(5, 900)


def test_a_13b_model_saturates_an_a100_with_512_tokens() -> None:
    """DistServe, section 3.1."""
    for engine in ("distserve", "vllm"):
        timing = named_profiles.load(f"{engine}/opt-13b/tp1").timing
        assert pipeline.prefill_saturation_tokens(timing, 2048) == 512


def test_it_is_never_more_than_the_model_takes() -> None:
    assert pipeline.prefill_saturation_tokens(WHOLE, 300) <= 300
    assert pipeline.prefill_saturation_tokens(WHOLE, 1) == 1
