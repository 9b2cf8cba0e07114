"""Shapes from what engines measure, held against shapes from configs that are understood."""

import json
from dataclasses import replace
from typing import Any

import pytest

from cleave.perf.model import engine_report, model_report, model_shape
from cleave.perf.model.known_models import CONFIGS
from cleave.perf.model.model_report import EngineFacts, GroupFacts
from cleave.perf.model.model_shape import ModelShape, UnknownModelError
from cleave.perf.model.quantization import WeightPart

from tests.support.engine_sizes import build_sizes
from tests.support.model_configs import HYBRID, INDEXED

SHAPES = {name: model_shape.from_config(name, config) for name, config in CONFIGS.items()}


def build_report(shape: ModelShape, tensor: int = 1, **more: Any) -> dict[str, Any]:
    """What an engine would report of a model of this shape."""
    per_layer = shape.compute_kv_bytes_on_gpu(tensor, 1) // shape.attention_layers
    groups = [
        GroupFacts("a", layers, 16, layers * per_layer, window)
        for window, layers in shape.list_windows()
    ]
    facts = EngineFacts(
        {}, shape.max_model_len, 16, "bfloat16", "auto", tensor, 1, groups, sizes=build_sizes(shape)
    )
    return {**json.loads(model_report.encode(facts)), **more}


def read(report: dict[str, Any]) -> ModelShape:
    return model_shape.from_config("m", engine_report.build_config(report))


@pytest.mark.parametrize("name", SHAPES)
def test_a_report_gives_the_sizes_that_the_config_gives(name: str) -> None:
    ours = SHAPES[name]
    shape = read(build_report(ours))
    assert shape.weight_bytes == pytest.approx(ours.weight_bytes, rel=1e-3)
    assert shape.active_parameters == pytest.approx(ours.active_parameters, rel=2e-3)
    assert shape.flops_per_token == pytest.approx(ours.flops_per_token, rel=1e-3)
    assert shape.copied_bytes_per_token == ours.kv_bytes_per_token
    for tokens in (1, 100, 100_000):
        found = shape.compute_context_bytes_on_gpu(tokens)
        assert found == ours.compute_context_bytes_on_gpu(tokens)
    if ours.experts is not None:
        assert shape.experts is not None
        routed = shape.get_bytes_per_weight(WeightPart.EXPERTS)
        assert routed == pytest.approx(ours.get_bytes_per_weight(WeightPart.EXPERTS))
        for rank in (2, 8):
            found_mlp = shape.compute_layer_mlp_bytes(1, rank)[1]
            assert found_mlp == pytest.approx(ours.compute_layer_mlp_bytes(1, rank)[1], rel=0.2)


@pytest.mark.parametrize("name", ["llama-3.1-70b", "qwen3-30b-a3b", "gpt-oss-20b"])
@pytest.mark.parametrize("reported", [1, 4])
def test_caches_are_shared_by_other_numbers_of_gpus_than_reported(name: str, reported: int) -> None:
    shape, ours = read(build_report(SHAPES[name], reported)), SHAPES[name]
    for tensor in (1, 2, 4, 8):
        found = shape.compute_copied_bytes_on_gpu(tensor)
        assert found == ours.compute_kv_bytes_on_gpu(tensor, 1)
        assert shape.explain_unsupported(tensor, 1) == ours.explain_unsupported(tensor, 1)


def test_latents_are_the_same_on_each_gpu() -> None:
    report = build_report(SHAPES["deepseek-v3"], 8)
    shape = read(report)
    assert {shape.compute_copied_bytes_on_gpu(tensor) for tensor in (1, 8, 16)} == {61 * 1152}
    assert shape.shardable_kv_heads == 1


@pytest.mark.parametrize("config", [HYBRID, INDEXED])
def test_states_and_kinds_of_caches_count(config: dict[str, Any]) -> None:
    ours = model_shape.from_config("m", config)
    groups = [
        {"kind": "a", "layers": 4, "blockSize": 16, "bytesPerToken": 4096},
        {"kind": "b", "layers": 4, "blockSize": 16, "stateBytes": 1 << 20},
    ]
    shape = read(build_report(replace(ours, states=None), cacheGroups=groups))
    assert (shape.copied_bytes_per_token, shape.compute_state_bytes()) == (4096, 1 << 20)
    assert shape.compute_context_bytes_on_gpu(10) == 40_960 + (1 << 20)
    assert not shape.has_one_kind_of_cache
    assert not shape.has_plain_layers
    assert shape.compute_state_bytes(2) == 1 << 19


def test_engine_arguments_are_in_the_sizes_already() -> None:
    shape = read(build_report(SHAPES["qwen3-8b"]))
    assert shape.with_quantization("fp8") is shape
    assert shape.with_kv_dtype("fp8") is shape
    assert shape.with_speculation('{"method": "mtp"}') is shape


def test_embeddings_that_are_shared_are_not_counted_twice() -> None:
    tied = replace(SHAPES["qwen3-8b"], has_tied_embeddings=True)
    shape = read(build_report(tied))
    assert shape.has_tied_embeddings
    assert shape.weight_bytes == pytest.approx(tied.weight_bytes, rel=1e-3)


def test_parts_for_images_count_as_weights() -> None:
    report = build_report(SHAPES["qwen3-8b"])
    before = read(report).weight_bytes
    report["sizes"]["weightBytes"] += 1_000_000_000
    assert read(report).weight_bytes == pytest.approx(before + 1e9, rel=1e-6)
    assert read(report).flops_per_token == SHAPES["qwen3-8b"].flops_per_token


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"sizes": None}, "engineReport.sizes is missing"),
        ({"cacheGroups": []}, "the engine reports no caches"),
        ({"cacheGroups": [7]}, "list the groups of caches"),
        ({"parallelism": {"tensor": 1, "pipeline": 2}}, "with one stage"),
        ({"maxModelLen": 0}, "engineReport.maxModelLen is 0"),
        ({"sizes": {"layers": 2}}, "engineReport.sizes.hiddenSize is missing"),
        ({"sizes": {"layers": "x"}}, "engineReport.sizes.layers is 'x'"),
    ],
)
def test_a_fault_names_the_field(change: dict[str, Any], fault: str) -> None:
    with pytest.raises(UnknownModelError, match=fault):
        read({**build_report(SHAPES["qwen3-8b"]), **change})
