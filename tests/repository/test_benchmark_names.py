"""Benchmarks import each other by bare names, so none may be that of an installed package."""

from importlib.metadata import packages_distributions
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_no_benchmark_has_the_name_of_an_installed_package() -> None:
    names = {file.stem for file in BENCHMARKS.rglob("*.py")} - {"__init__"}
    assert names.isdisjoint(packages_distributions())
