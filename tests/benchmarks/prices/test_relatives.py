"""GPUs priced as if they had no tables of their own."""

from collections.abc import Callable
from types import ModuleType

import pytest

Import = Callable[[str], ModuleType]


def test_a_gpu_is_its_own_best_relative(module: Import, monkeypatch: pytest.MonkeyPatch) -> None:
    relatives = module("relatives")
    monkeypatch.setattr(relatives, "MODELS", ("qwen3-30b-a3b",))
    monkeypatch.setattr(relatives, "TENSORS", (1,))
    rows = list(relatives.iter_errors("H200-SXM-141GB", "H200-SXM-141GB"))
    assert {key for key, *_ in rows} == {("MoE", "prefill"), ("MoE", "decode")}
    assert [error for _, _, error in rows] == pytest.approx([0.0] * len(rows))
    assert any(abs(error) > 0.01 for _, error, _ in rows)
