import importlib


def test_the_measured_simulation_runs() -> None:
    """It is a string, in which renames are easily forgotten."""
    exec(importlib.import_module("commands").SIMULATE, {})
