"""Weights as workers of vLLM count them are those that plans count from the same config."""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cleave.perf.hardware.gpu import find_gpu
from cleave.perf.hardware.memory import MemoryReserve, compute_max_context_tokens
from cleave.perf.model import model_shape
from cleave_worker.vllm import model_sizes

from tests.support.engine_sizes import build_sizes

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]

TYPES = ("apertus", "ernie4_5_moe", "qwen2_moe", "gemma2", "deepseek_v3", "nemotron_h")
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def test_workers_count_what_plans_count(module: Callable[[str], ModuleType]) -> None:
    pytest.importorskip("vllm")
    architectures = module("architectures")
    with architectures.run.run_vllm():
        for model_type in TYPES:
            config = architectures.build_config(model_type)
            if model_type != "nemotron_h":
                config["num_hidden_layers"] = 4
            for more in ({}, {"quantization_config": FP8}):
                compare(architectures.run, {**config, **more})


def compare(run: ModuleType, config: dict[str, Any]) -> None:
    model, _ = run.build_model(config)
    found = model_sizes.count_weights(model)
    ours = build_sizes(model_shape.from_config("m", config))
    for name, value in found.items():
        if name.startswith("expert") and not ours.experts:
            assert value == 0, name
            continue
        expected = pytest.approx(getattr(ours, name), rel=0.01)
        assert value == expected, (config["model_type"], "quantization_config" in config, name)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen2.5-7b", "openai/gpt-oss-20b"])
def test_the_longest_context_that_fits_is_vllms_own(name: str) -> None:
    pytest.importorskip("vllm")
    import torch
    from vllm.v1.core.kv_cache_utils import estimate_max_model_len
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    shape = model_shape.load_shape(name)
    window, beside = shape.sliding_window, 2048
    windowed = window.layers if window else 0
    sizes = {"block_size": 16, "num_kv_heads": shape.num_kv_heads, "head_size": shape.head_size}
    whole = FullAttentionSpec(**sizes, dtype=torch.bfloat16)
    specs = {f"whole {i}": whole for i in range(shape.attention_layers - windowed)}
    if window:
        cut = SlidingWindowSpec(**sizes, dtype=torch.bfloat16, sliding_window=window.tokens)
        specs |= {f"cut {i}": cut for i in range(windowed)}
    # The block that vLLM keeps free; layers of two kinds share blocks.
    free = sum(each.page_size_bytes for each in specs.values()) // (2 if window else 1)
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=shape.max_model_len),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        max_in_flight_tokens=beside,
    )
    endless = replace(find_gpu("H100"), memory_gib=1e6)
    for share in (0.02, 0.2, 0.7):
        kv_bytes = int(share * shape.compute_context_bytes_on_gpu(shape.max_model_len))
        reserve = MemoryReserve(kv_bytes=kv_bytes, max_num_batched_tokens=beside)
        ours = compute_max_context_tokens(shape, endless, 1, 1, reserve)
        assert ours == estimate_max_model_len(config, specs, kv_bytes - free)
