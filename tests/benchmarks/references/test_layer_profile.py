"""LLMServingSim's profiles, from small files of the same form."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from cleave.perf.model.model_shape import load_shape
from cleave.perf.profile import operator_fit
from cleave.perf.roofline.roofline import VLLM

Import = Callable[[str], ModuleType]
ATTENTION = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n"


def write_profile(folder: Path) -> None:
    dense = ["layer,tokens,time_us"]
    for layer in ("qkv_proj", "layernorm", "embedding"):
        dense += [f"{layer},{tokens},10" for tokens in (1, 2048)]
    (folder / "dense.csv").write_text("\n".join(dense))
    heads = [f"{name},{n},5" for name in ("lm_head", "sampler") for n in (1, 256)]
    (folder / "per_sequence.csv").write_text("\n".join(["layer,sequences,time_us", *heads]))
    prompts = "".join(f"{n},0,0,0,{n / 100}\n" for n in (16, 256, 2048))
    decoding = "".join(f"0,0,{n},{at},{4 + n * at / 1e4}\n" for n in (1, 256) for at in (16, 1024))
    both = "16,0,1,16,9999\n"
    (folder / "attention.csv").write_text(ATTENTION + prompts + decoding + both)
    experts = [f"{n},{k},{100 * k}" for n in (1, 2048) for k in (8, 64, 128)]
    (folder / "moe.csv").write_text("\n".join(["tokens,activated_experts,time_us", *experts]))


def test_an_iteration_is_the_sum_of_its_layers(module: Import, tmp_path: Path) -> None:
    write_profile(tmp_path)
    shape = load_shape("llama-3.1-8b")
    operators = module("layer_profile").read_operators(tmp_path, shape, 1, 1)
    timing = operator_fit.to_timing(operators, 1)
    # Two norms and a product in each layer, embedding, head and sampler once.
    layer_ms, once_ms = 0.030 + 0.004 + 1024 / 1e7, 0.010 + 0.010
    expected = VLLM.iteration_ms + 32 * layer_ms + once_ms
    assert timing.predict_decode_ms(1, 1024) == pytest.approx(expected)


def test_ranks_share_the_experts_and_exchange_rows(module: Import, tmp_path: Path) -> None:
    write_profile(tmp_path)
    shape, read = load_shape("qwen3-30b-a3b"), module("layer_profile").read_operators
    alone, shared = (
        [p.ms for p in read(tmp_path, shape, 1, ranks).layer if p.operator == "moe"][-1]
        for ranks in (1, 2)
    )
    # At 2,048 rows each rank has its half of the experts in use, and sends 8.4 MB twice.
    assert alone == pytest.approx(12.8)
    assert shared == pytest.approx(6.4 + 2 * (0.02 + 2048 * 4096 / 16e6))
