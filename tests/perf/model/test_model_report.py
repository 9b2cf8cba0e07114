"""What engines write about their model."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cleave.perf.model import model_report, model_shape
from cleave.perf.model.known_models import CONFIGS
from cleave.perf.model.model_report import EngineFacts, GroupFacts, HostMemoryFacts

from tests.support.model_configs import HYBRID, INDEXED

FACTS = EngineFacts(
    CONFIGS["qwen3-8b"], 4096, 16, "bfloat16", "auto", 1, 1, [GroupFacts("a", 36, 16, 147456)]
)


def test_a_report_is_written_and_read_beside_the_load_page(tmp_path: Path) -> None:
    page = tmp_path / "load"
    assert model_report.read(page) == ""
    model_report.write(page, FACTS)
    assert model_report.read(page) == model_report.encode(FACTS)
    assert [path.name for path in tmp_path.iterdir()] == ["model.json"]


def test_a_report_that_is_too_long_is_neither_written_nor_read(tmp_path: Path) -> None:
    page = tmp_path / "load"
    long = {f"field_{number}": "x" * 100 for number in range(1_000)}
    model_report.write(page, replace(FACTS, config=long))
    assert model_report.read(page) == ""
    model_report.get_path(page).write_text("1" * (model_report.MAX_LENGTH + 1))
    assert model_report.read(page) == ""
    model_report.get_path(page).write_bytes(b"\xff\xfe")
    assert model_report.read(page) == ""


def test_host_memory_is_read_from_a_report_that_has_it() -> None:
    memory = HostMemoryFacts(500_000, 0.01)
    text = model_report.encode(replace(FACTS, host_memory=memory))
    assert model_report.read_host_memory(text) == memory
    own = '{"hostMemory": {"tokens": %s, "tokenMs": 1}}'
    for other in ("", "[]", "1", "{}", model_report.encode(FACTS), own % "-1", own % '"many"'):
        assert model_report.read_host_memory(other) == HostMemoryFacts()


def test_equal_facts_have_equal_texts() -> None:
    backwards = dict(reversed(CONFIGS["qwen3-8b"].items()))
    assert model_report.encode(replace(FACTS, config=backwards)) == model_report.encode(FACTS)


@pytest.mark.parametrize("config", [HYBRID, INDEXED, *CONFIGS.values()])
def test_the_selected_fields_have_the_shape_of_the_whole_config(config: dict) -> None:
    long = {
        **config,
        "vision_config": {"hidden_size": 1},
        "id2label": {"0": "LABEL_0"},
        "chat": "x" * 1000,
    }
    kept = json.loads(json.dumps(model_report.select_config(long)))
    assert kept == json.loads(json.dumps(model_report.select_config(config)))
    assert model_shape.from_config("m", kept) == model_shape.from_config("m", config)


def test_lists_of_layers_that_are_not_quantised_are_shortened() -> None:
    ignored = [f"model.layers.{number}.self_attn" for number in range(500)]
    quantization = {"quant_method": "fp8", "modules_to_not_convert": [*ignored, "lm_head"]}
    kept = model_report.select_config({"text_config": {"quantization_config": quantization}})
    short = ["lm_head", "model.layers.0-499.self_attn"]
    own = {"quant_method": "fp8", "modules_to_not_convert": short}
    assert kept == {"text_config": {"quantization_config": own}}


def test_layers_with_formats_of_their_own_are_shortened() -> None:
    fp8, fp4 = {"quant_algo": "FP8"}, {"quant_algo": "NVFP4"}
    layers = {f"model.layers.{i}.mlp.up_proj": fp8 if i < 3 else fp4 for i in range(8)}
    quantization = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    kept = model_report.select_config({"quantization_config": quantization})
    short = {"model.layers.0-2.mlp.up_proj": fp8, "model.layers.3-7.mlp.up_proj": fp4}
    assert kept == {"quantization_config": {**quantization, "quantized_layers": short}}


def test_null_is_kept_as_false_which_statuses_do_not_lose() -> None:
    assert model_report.select_config({"sliding_window": None}) == {"sliding_window": False}


def test_infinite_numbers_are_left_out() -> None:
    limits = {"time_step_limit": [0.0, float("inf")], "inner": {"a": float("nan"), "b": 1.5}}
    assert model_report.select_config(limits) == {"inner": {"b": 1.5}}


def test_the_digest_is_of_the_whole_config_and_of_nothing_else() -> None:
    digest = json.loads(model_report.encode(FACTS))["configDigest"]
    other = {**FACTS.config, "transformers_version": "5.0"}
    changed = json.loads(model_report.encode(replace(FACTS, config=other)))
    assert changed["configDigest"] != digest
    assert changed["config"] == json.loads(model_report.encode(FACTS))["config"]
    parallel = json.loads(model_report.encode(replace(FACTS, tensor=4, groups=[])))
    assert parallel["configDigest"] == digest
