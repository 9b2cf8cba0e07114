"""What is recorded of vLLM's allocations is what the pinned vLLM allocates."""

import json
from collections.abc import Callable
from types import ModuleType

import pytest

from cleave.perf.model.family_table import FAMILIES

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]


def test_the_record_is_what_vllm_allocates(module: Callable[[str], ModuleType]) -> None:
    pytest.importorskip("vllm")
    run = module("run")
    recorded, configs = run.read_recorded(), run.read_configs()
    with run.run_vllm():
        found = {name: run.measure(configs[name]) for name in recorded}
    assert found == recorded


SAMPLE = ("apertus", "cohere2", "ernie4_5_moe", "nemotron_h")
"""An MLP without gate, windows and tied embeddings, experts under other names, states."""


def test_classes_and_a_sample_of_types_are_those_of_vllm(
    module: Callable[[str], ModuleType],
) -> None:
    pytest.importorskip("vllm")
    architectures, class_defaults = module("architectures"), module("class_defaults")
    written = json.loads(class_defaults.WRITTEN.read_text())
    found = class_defaults.collect()
    # Of the others vLLM changes classes as it loads models.
    assert {name: found.get(name) for name in FAMILIES} == {
        name: written.get(name) for name in FAMILIES
    }
    registered, measured = architectures.read_recorded()
    assert architectures.list_registered() == registered
    with architectures.run.run_vllm():
        for name in SAMPLE:
            config = architectures.build_config(name)
            assert architectures.measure_type(name, config) == measured[name], name
