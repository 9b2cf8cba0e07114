"""What is recorded of vLLM's allocations is what the pinned vLLM allocates."""

from collections.abc import Callable
from types import ModuleType

import pytest

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
