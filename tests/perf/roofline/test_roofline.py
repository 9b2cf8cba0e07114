"""Computed passes."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.perf import named_profiles
from cleave.perf.hardware import gpu
from cleave.perf.hardware.link import build_node_link
from cleave.perf.model import model_shape
from cleave.perf.model.model_shape import ModelShape
from cleave.perf.model.quantization import Quantization
from cleave.perf.profile import curve
from cleave.perf.published import distserve
from cleave.perf.roofline import roofline
from cleave.perf.roofline.efficiency import select_efficiency, select_efficiency_of_2023
from cleave.perf.roofline.roofline import Roofline
from cleave.perf.timing import EngineTiming

from tests.support.model_configs import HYBRID

A100, H100 = gpu.find_gpu("A100-SXM-80GB"), gpu.find_gpu("H100-SXM-80GB")
PROMPTS = ((128,), (512,), (1024,), (2048,), (512,) * 4)
BATCHES = tuple((batch, batch * mean) for batch in (1, 16, 64, 128) for mean in (128, 1024))


def build(shape: ModelShape, device: gpu.Gpu, tensor: int = 1) -> Roofline:
    return Roofline(shape, device, tensor, build_node_link(device), select_efficiency(device))


def timing(name: str, device: gpu.Gpu = A100, tensor: int = 1) -> EngineTiming:
    return build(model_shape.load_shape(name), device, tensor).to_timing()


def test_norms_over_all_heads_cost_an_all_reduce_in_every_layer() -> None:
    shape = model_shape.load_shape("llama-3.1-70b")
    whole = replace(shape, norms_all_heads=True)
    alone, shared = (
        build(whole, H100, tensor).predict_rows_ms(8, 8)
        - build(shape, H100, tensor).predict_rows_ms(8, 8)
        for tensor in (1, 4)
    )
    assert alone == 0
    assert shared == pytest.approx(80 * 0.0048, rel=0.05)


@pytest.mark.parametrize("name", [name for name in distserve.FITS if name.startswith("distserve")])
def test_distserves_engine_is_met_within_an_eighth(name: str) -> None:
    _, shape, size = name.split("/")
    computed = Roofline(
        model_shape.load_shape(shape),
        A100,
        int(size[2:]),
        build_node_link(A100),
        select_efficiency_of_2023(A100),
        roofline.CUDA_GRAPHS,
    ).to_timing()
    published = named_profiles.load_profile(name).timing
    prefill = curve.compute_mean_error(
        (computed.predict_prefill_ms(p), published.predict_prefill_ms(p)) for p in PROMPTS
    )
    decode = curve.compute_mean_error(
        (computed.predict_decode_ms(*b), published.predict_decode_ms(*b)) for b in BATCHES
    )
    assert prefill is not None
    assert decode is not None
    assert prefill < 0.125
    assert decode < 0.125


@pytest.mark.parametrize("device", [A100, H100])
@pytest.mark.parametrize("name", ["opt-13b", "llama-3.1-8b", "qwen3-30b-a3b"])
def test_reading_the_weights_is_the_floor_of_a_decode_pass(name: str, device: gpu.Gpu) -> None:
    shape = model_shape.load_shape(name)
    active = 2 * (shape.active_parameters - shape.embedding_parameters)
    floor_ms = active / (device.memory_gbps * 1e6)
    assert timing(name, device).predict_decode_ms(1, 0) > floor_ms


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3"])
def test_computing_is_the_floor_of_a_prompt_pass(name: str) -> None:
    shape = model_shape.load_shape(name)
    floor_ms = 4096 * shape.flops_per_token / (H100.dense_tflops * 1e9) / 8
    assert timing(name, H100, 8).predict_prefill_ms([4096]) > floor_ms


@given(
    st.sampled_from(["opt-13b", "llama-3.1-70b", "mixtral-8x7b", "deepseek-v3"]),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 16_000),
    st.integers(1, 700),
)
def test_more_work_takes_longer(name: str, tensor: int, tokens: int, batch: int) -> None:
    found = _cached(name, tensor)
    assert found.predict_prefill_ms([tokens]) < found.predict_prefill_ms([tokens + 64])
    assert found.predict_decode_ms(batch, 1000) < found.predict_decode_ms(batch + 8, 1000)
    assert found.predict_decode_ms(batch, 1000) < found.predict_decode_ms(batch, 2000)
    # No jump from one point of the tables to the next.
    assert found.predict_prefill_ms([tokens + 1]) < 1.2 * found.predict_prefill_ms([tokens])


_TIMINGS: dict[tuple[str, int], EngineTiming] = {}


def _cached(name: str, tensor: int) -> EngineTiming:
    if (name, tensor) not in _TIMINGS:
        _TIMINGS[name, tensor] = timing(name, H100, tensor)
    return _TIMINGS[name, tensor]


def test_more_gpus_take_less_time_for_a_long_prompt_but_never_their_share() -> None:
    passes = [
        timing("llama-2-70b", A100, tensor).predict_prefill_ms([2048]) for tensor in (1, 2, 4, 8)
    ]
    for one, two in pairwise(passes):
        assert one / 2 < two < one


def test_pcie_makes_tensor_parallel_dear() -> None:
    shape, slow = model_shape.load_shape("llama-2-70b"), replace(A100, nvlink_gbps=None)
    fast_ms, slow_ms = (
        Roofline(shape, A100, 4, build_node_link(device), select_efficiency(A100))
        .to_timing()
        .predict_prefill_ms([2048])
        for device in (A100, slow)
    )
    assert slow_ms > 1.5 * fast_ms


def test_a_power_cap_slows_prompts_and_leaves_decoding() -> None:
    capped = H100.with_power_cap(350)
    slower = timing("llama-3.1-8b", capped).predict_prefill_ms([4096])
    assert slower / timing("llama-3.1-8b", H100).predict_prefill_ms([4096]) == pytest.approx(
        1.25, abs=0.06
    )
    once, later = (
        timing("llama-3.1-8b", device).predict_decode_ms(4, 4000) for device in (H100, capped)
    )
    assert later == pytest.approx(once, rel=0.02)


def test_eight_bits_shorten_prompts_on_a_gpu_that_computes_in_them() -> None:
    shape = model_shape.load_shape("llama-3.1-8b")
    quantised = replace(shape, quantization=Quantization("fp8", 8, is_8_bit_compute=True))

    def prefill(each: model_shape.ModelShape, device: gpu.Gpu) -> float:
        return build(each, device).to_timing().predict_prefill_ms([2048])

    assert 0.6 < prefill(quantised, H100) / prefill(shape, H100) < 0.92
    assert prefill(quantised, A100) / prefill(shape, A100) > 0.95


def test_an_engine_whose_host_starts_the_kernels_is_no_faster_than_its_host() -> None:
    shape = model_shape.load_shape("llama-2-70b")
    engine = roofline.EngineOverhead("slow", 5.0, 0.5)
    found = replace(build(shape, A100, 8), engine=engine).to_timing()
    assert found.predict_decode_ms(1, 0) == pytest.approx(5.0 + 80 * 0.5)


def test_state_layers_take_time_by_request_and_none_by_context() -> None:
    hybrid = model_shape.from_config("m", HYBRID)
    timed, without = (
        build(each, H100).to_timing() for each in (hybrid, replace(hybrid, states=None))
    )
    # Twelve of 48 layers attend.
    assert timed.decode_context_ms[0] * 4 == pytest.approx(without.decode_context_ms[0])
    assert timed.prompt_square_ms * 4 == pytest.approx(without.prompt_square_ms)
    read_ms = 2 * hybrid.compute_state_bytes() / (H100.memory_gbps * 1e6)
    rows = build(hybrid, H100).predict_rows_ms(64, 64)
    assert timed.decode_ms[64] - rows >= 64 * read_ms
