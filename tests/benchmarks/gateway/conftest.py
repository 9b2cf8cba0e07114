import importlib
import shutil
from pathlib import Path
from types import ModuleType

import pytest

SOURCES = Path(__file__).parents[3] / "benchmarks" / "gateway"


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SOURCES))
    return importlib.import_module("figures")


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the compiled C tools."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    monkeypatch.syspath_prepend(str(SOURCES))
    processes = importlib.import_module("processes")
    processes.build_tools()
    return processes.BUILD
