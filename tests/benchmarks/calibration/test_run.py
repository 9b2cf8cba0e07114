"""The calibration table, as far as it needs no data folder."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SOURCES = Path(__file__).parents[3] / "benchmarks" / "calibration"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SOURCES))
    spec = importlib.util.spec_from_file_location("calibration_run", SOURCES / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "calibration_run", module)
    spec.loader.exec_module(module)
    return module


def test_constants_of_2023_are_as_far_off_as_the_readme_says(run: ModuleType) -> None:
    graphs = [line for line in run.roofline_of_distserve() if line.source.startswith("distserve")]
    worst = max(line.prefill for line in graphs)
    assert worst == pytest.approx(0.11, abs=0.005)
    assert max(line.decode for line in graphs) <= worst
    h100 = [
        line.prefill
        for line in run.roofline_of_splitwise()
        if "H100" in line.source and line.note == "to 2,048 tokens"
    ]
    assert sum(h100) / len(h100) == pytest.approx(0.19, abs=0.005)


def test_interpolation_of_decode_beats_five_percent_everywhere(run: ModuleType) -> None:
    assert all(line.decode < 0.05 for line in run.interpolation())
