"""Prompts whose kernels the host starts."""

from dataclasses import replace

import pytest

from cleave.perf import host_launch
from cleave.perf.hardware.gpu import find_gpu
from cleave.perf.host_launch import FLASHINFER_FP4_MS, FLASHINFER_FP8_MS, LAUNCH_MS, HostLaunch
from cleave.perf.model import model_shape
from cleave.perf.model.model_shape import ModelShape
from cleave.perf.model.quantization import Quantization
from cleave.perf.timing import EngineTiming

FAST = EngineTiming(16.0, tuple(i / 100 for i in range(513)), 0.0, (1.0, 1.0), (0.0,))
"""0.01 ms for 16 prompt tokens."""


def load(model: str, quantization: Quantization | None = None) -> ModelShape:
    return replace(model_shape.load_shape(model), quantization=quantization)


def test_prompts_beyond_the_graphs_take_the_time_of_the_host() -> None:
    shape, launch = load("llama-3.1-8b"), HostLaunch(LAUNCH_MS, graph_tokens=512)
    bound = host_launch.bound_prompts(FAST, shape, 1, launch)
    assert bound.predict_prefill_ms([512]) == FAST.predict_prefill_ms([512])
    host_ms = host_launch.compute_host_ms(shape, 1, launch)
    assert bound.predict_prefill_ms([528]) == pytest.approx(0.3 + host_ms)
    assert bound.predict_decode_ms(1, 100) == FAST.predict_decode_ms(1, 100)


def test_prompts_whose_kernels_take_longer_are_not_slower() -> None:
    slow = replace(FAST, prompt_ms=tuple(i * 1.0 for i in range(513)))
    launch = HostLaunch(LAUNCH_MS, graph_tokens=0)
    bound = host_launch.bound_prompts(slow, load("llama-3.1-8b"), 1, launch)
    assert bound.predict_prefill_ms([2048]) == slow.predict_prefill_ms([2048])


def test_a_layer_has_four_products_five_other_operators_and_two_all_reduces() -> None:
    shape, launch = load("llama-3.1-8b"), HostLaunch(0.1, graph_tokens=0)
    for tensor, others in ((1, 5), (2, 7)):
        per_layer = host_launch.compute_host_ms(shape, tensor, launch) / shape.num_layers
        assert per_layer == pytest.approx(4 * 0.1 + others * LAUNCH_MS)


def test_routed_experts_are_started_once() -> None:
    shape, launch = load("gpt-oss-120b"), HostLaunch(LAUNCH_MS, graph_tokens=0)
    per_layer = host_launch.compute_host_ms(shape, 1, launch) / shape.num_layers
    assert per_layer == pytest.approx((3 + 1 + 5) * LAUNCH_MS), "query, output, router; experts"


FP8 = Quantization("modelopt", 8, is_8_bit_compute=True)


@pytest.mark.parametrize(
    ("gpu", "quantization", "product_ms", "graph_tokens"),
    [
        ("H200", FP8, LAUNCH_MS, 512),
        ("B200", None, LAUNCH_MS, 1024),
        ("B200", FP8, FLASHINFER_FP8_MS, 1024),
        ("B200", replace(FP8, method="compressed-tensors"), LAUNCH_MS, 1024),
        (
            "B200",
            Quantization("modelopt", 4.5, False, is_4_bit_compute=True),
            FLASHINFER_FP4_MS,
            1024,
        ),
        ("RTX-PRO-6000-Server", FP8, LAUNCH_MS, 512),
    ],
)
def test_vllm_starts_products_by_flashinfer_on_blackwell(
    gpu: str, quantization: Quantization | None, product_ms: float, graph_tokens: int
) -> None:
    launch = host_launch.select_host_launch(load("llama-3.1-8b", quantization), find_gpu(gpu))
    assert launch == HostLaunch(product_ms, graph_tokens)
