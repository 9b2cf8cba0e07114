import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SOURCES = Path(__file__).parents[3] / "benchmarks" / "operator"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A module of the benchmark, by its name."""
    monkeypatch.syspath_prepend(str(SOURCES))
    return importlib.import_module
