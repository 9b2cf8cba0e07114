"""What is read from the peers, without the peers."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

from cleave.simulator.trace import Trace


def build_trace() -> Trace:
    return Trace(np.array([500.0, 700.0]), np.array([8, 9]), np.array([3, 4]))


def test_a_sampled_grid_is_scaled_to_the_whole_and_names_no_winner() -> None:
    other_planners = importlib.import_module("other_planners")
    grid = other_planners.Grid("a", nodes=4, gpus_per_node=8, high=True, sample=2)
    found = [
        {"config": [1, 1, 1, 1, 1], "goodput_per_gpu": 2.0},
        {"config": [1, 8, 1, 8, 1], "goodput_per_gpu": None},
    ]
    raw = {"num_configs": 10, "seconds": [3.0, 1.0], "found": found}
    result = other_planners._read_grid(grid, raw)
    assert result.seconds == pytest.approx(20.0)
    assert result.best is None


def test_a_whole_grid_names_the_best_configuration_that_ran() -> None:
    other_planners = importlib.import_module("other_planners")
    grid = other_planners.Grid("a", nodes=1, gpus_per_node=4, high=False)
    found = [
        {"config": [1, 8, 1, 8, 1], "goodput_per_gpu": None},
        {"config": [1, 2, 1, 1, 1], "goodput_per_gpu": 2.5},
        {"config": [1, 1, 1, 1, 1], "goodput_per_gpu": 2.0},
    ]
    raw = {"num_configs": 3, "seconds": [0.1, 3.0, 1.0], "found": found}
    assert other_planners._read_grid(grid, raw).best == ((1, 2, 1, 1, 1), 2.5)


def test_a_peer_that_fails_is_named_with_its_last_line(tmp_path: Path) -> None:
    other_planners = importlib.import_module("other_planners")
    (tmp_path / "simdistserve").mkdir()
    with pytest.raises(other_planners.AnchorError, match="ModuleNotFoundError"):
        other_planners.run_simdistserve(tmp_path, Path(sys.executable), build_trace(), [], [])


def test_a_peer_that_begins_and_ends_has_a_duration() -> None:
    other_planners = importlib.import_module("other_planners")
    command = [sys.executable, "-c", "print('begin'); print('working'); print('end')"]
    assert other_planners._time_between(command, {}, Path("/"), "begin", "end") >= 0


def test_a_peer_that_never_begins_is_an_error() -> None:
    other_planners = importlib.import_module("other_planners")
    command = [sys.executable, "-c", "print('no such profile')"]
    with pytest.raises(other_planners.AnchorError, match="no such profile"):
        other_planners._time_between(command, {}, Path("/"), "begin", "end")
