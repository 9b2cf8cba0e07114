"""Benchmarks are folders of scripts, not packages."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

Import = Callable[[str], ModuleType]


@pytest.fixture
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Import]:
    """Imports a module of the benchmark that the test's folder is named after.

    Other benchmarks have modules of the same names.
    """
    sources = BENCHMARKS / request.path.parent.name
    names = {path.stem for path in sources.glob("*.py")}
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(sources))
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)
