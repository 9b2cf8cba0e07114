"""Stages, and the prompt that saturates a GPU."""

from dataclasses import replace

import pytest

from cleave.perf import named_profiles, pipeline
from cleave.perf.hardware.link import Link, LinkKind
from cleave.perf.model import model_shape

SHAPE = model_shape.load_shape("opt-13b")
NETWORK = Link(LinkKind.INFINIBAND, 25.0, 5.0)
WHOLE = named_profiles.load_profile("distserve/opt-13b/tp1").timing


def test_one_stage_is_the_whole() -> None:
    assert pipeline.split_into_stages(WHOLE, SHAPE, 1, NETWORK) is WHOLE


def test_stages_share_the_pass_and_pay_for_their_hops() -> None:
    cut = pipeline.split_into_stages(WHOLE, SHAPE, 4, NETWORK)
    hop_ms = NETWORK.compute_send_ms(512 * 5120 * 2)
    assert cut.stages == 4
    assert cut.predict_prefill_ms([512]) == pytest.approx(
        WHOLE.predict_prefill_ms([512]) + 3 * hop_ms
    )


def test_layers_that_do_not_divide_make_every_stage_as_slow_as_the_fullest() -> None:
    cut = pipeline.split_into_stages(WHOLE, SHAPE, 3, NETWORK)
    hops_ms = 2 * NETWORK.compute_send_ms(5 * 5120 * 2)
    expected = WHOLE.predict_decode_ms(5, 900) * 14 * 3 / 40 + hops_ms
    assert cut.predict_decode_ms(5, 900) == pytest.approx(expected)


def test_more_stages_than_were_measured_are_dearer() -> None:
    prices = [pipeline.compute_stages_price(stages) for stages in (2, 4, 7, 10)]
    assert prices == pytest.approx([1.23, 1.23, 1.46, 1.69])


def test_each_phase_is_scaled_alone() -> None:
    scaled = pipeline.scale_timing(WHOLE, prompt=1.3)
    assert scaled.predict_prefill_ms([700, 20]) == pytest.approx(
        1.3 * WHOLE.predict_prefill_ms([700, 20])
    )
    assert scaled.predict_decode_ms(5, 900) == WHOLE.predict_decode_ms(5, 900)


def test_contexts_beside_prompts_are_decoding() -> None:
    dear = replace(WHOLE, mixed_context_ms=(0.5,))
    assert pipeline.scale_timing(dear, prompt=3.0, decode=2.0).mixed_context_ms == (1.0,)


def test_a_13b_model_saturates_an_a100_with_512_tokens() -> None:
    """DistServe, section 3.1."""
    for engine in ("distserve", "vllm"):
        timing = named_profiles.load_profile(f"{engine}/opt-13b/tp1").timing
        assert pipeline.find_prefill_saturation_tokens(timing, 2048) == 512


def test_it_is_never_more_than_the_model_takes() -> None:
    assert pipeline.find_prefill_saturation_tokens(WHOLE, 300) <= 300
    assert pipeline.find_prefill_saturation_tokens(WHOLE, 1) == 1
