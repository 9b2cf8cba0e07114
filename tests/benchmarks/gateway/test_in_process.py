"""The gateway between lists: it serves what it is measured with, in few enough calls."""

import importlib
from types import ModuleType

import pytest

CALLS = {
    "plain": 150,
    "plain, everything on": 185,
    "P/D": 188,
    "P/D, everything on": 222,
}
"""Cleave's own functions that a request may call: about a tenth more than it does."""


@pytest.fixture
def alone(figures: ModuleType) -> ModuleType:
    return importlib.import_module("alone")


@pytest.mark.parametrize("case", CALLS)
def test_a_request_takes_no_more_calls_than_it_is_allowed(alone: ModuleType, case: str) -> None:
    roles, everything = alone.CASES[case]
    bench = alone.Bench(roles, everything=everything)
    for _ in range(3):
        bench.serve(0)
    assert alone.count_calls(lambda: bench.serve(0)) <= CALLS[case]


def test_a_token_takes_six_calls_where_each_is_sent_by_itself(alone: ModuleType) -> None:
    bench = alone.Bench(("mixed",), everything=True)
    bench.serve(0)
    few, many = (alone.count_calls(lambda n=n: bench.serve(n)) for n in (16, 26))
    assert many - few <= 6 * 10 + 2
