import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

SOURCES = Path(__file__).parents[3] / "benchmarks" / "day"

Import = Callable[[str], ModuleType]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Import]:
    """Imports a module of the benchmark; other benchmarks have modules of the same names."""
    names = {path.stem for path in SOURCES.glob("*.py")}
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(SOURCES))
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)
