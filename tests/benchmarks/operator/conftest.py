import importlib
from pathlib import Path
from types import ModuleType

import pytest

SOURCES = Path(__file__).parents[3] / "benchmarks" / "operator"


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SOURCES))
    return importlib.import_module("trial")


@pytest.fixture
def operator_process(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SOURCES))
    return importlib.import_module("operator_process")
