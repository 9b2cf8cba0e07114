"""What must be installed before anything is started."""

import pytest

from cleave.api.engine import EngineType
from cleave.local import planning
from cleave.local.errors import UpError


def test_vllm_without_its_system_library_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planning, "_NUMA", "libabsent.so.1")
    with pytest.raises(UpError) as refused:
        planning.must_be_installed(EngineType.VLLM)
    assert "vLLM needs libabsent.so.1: apt-get install libnuma1" in str(refused.value)


def test_the_emulated_engine_needs_no_system_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_NUMA", "libabsent.so.1")
    planning.must_be_installed(EngineType.EMULATED)


def test_a_package_that_is_absent_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "find_spec", lambda _: None)
    with pytest.raises(UpError, match="worker-cpu"):
        planning.must_be_installed(EngineType.VLLM)
