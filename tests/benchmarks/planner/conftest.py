from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[3] / "benchmarks" / "planner"


@pytest.fixture(autouse=True)
def sources(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The benchmark's modules import one another as scripts do."""
    monkeypatch.syspath_prepend(str(SOURCES))
    return SOURCES
