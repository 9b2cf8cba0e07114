"""Weights as workers of vLLM count them are those that plans count from the same config."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

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
