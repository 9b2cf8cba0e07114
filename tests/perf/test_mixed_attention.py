"""Decoding beside prompts where FlashAttention 2 serves both."""

from dataclasses import replace

import pytest

from cleave.perf.hardware.gpu import find_gpu
from cleave.perf.mixed_attention import scale_mixed
from cleave.perf.model import model_shape
from cleave.perf.timing import EngineTiming

TIMING = EngineTiming(16.0, (1.0, 2.0), 0.0, (1.0, 1.0), (0.5, 0.25))
LLAMA = model_shape.load_shape("llama-3.1-8b")


def list_factors(model: str, tensor: int = 1) -> list[float]:
    shape = model_shape.load_shape(model)
    found = scale_mixed(TIMING, shape, find_gpu("L40S"), tensor).mixed_context_ms
    return [found[batch] / 0.25 for batch in (1, 32, 48, 128)]


def test_each_further_query_head_of_a_group_reads_a_share_again() -> None:
    assert list_factors("llama-3.1-8b") == pytest.approx([1.75, 1.75, 1.855, 2.56])
    assert list_factors("qwen3-32b", tensor=2) == pytest.approx([2.75, 2.75, 2.995, 4.64])


def test_gpus_that_split_groups_have_smaller_ones() -> None:
    # 64 query heads and 8 KV heads on 16 GPUs: 4 to 1.
    assert list_factors("qwen3-32b", tensor=16)[0] == pytest.approx(1.75)


@pytest.mark.parametrize("gpu", ["H100-SXM-80GB", "B200-SXM-180GB", "T4", "MI300X"])
def test_gpus_with_other_kernels_are_as_before(gpu: str) -> None:
    assert scale_mixed(TIMING, LLAMA, find_gpu(gpu), 1) is TIMING


@pytest.mark.parametrize("model", ["opt-13b", "deepseek-v3"])
def test_models_without_groups_are_as_before(model: str) -> None:
    shape = model_shape.load_shape(model)
    assert scale_mixed(TIMING, shape, find_gpu("A100-80GB"), 1) is TIMING


def test_kv_in_8_bits_is_read_by_another_kernel() -> None:
    assert scale_mixed(TIMING, replace(LLAMA, kv_dtype_bytes=1), find_gpu("L4"), 1) is TIMING
