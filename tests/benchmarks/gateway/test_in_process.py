"""The gateway between lists: it serves what it is measured with, in few enough calls."""

import importlib
from types import ModuleType

import pytest

CALLS = {
    "plain": 325,
    "plain, everything on": 375,
    "P/D": 380,
    "P/D, everything on": 430,
}
"""Cleave's own functions that a request may call: about a tenth more than it does. 54 of them look
for instances that have its prompt cached, as the prompt is always the same."""


@pytest.fixture
def in_process(figures: ModuleType) -> ModuleType:
    return importlib.import_module("in_process")


@pytest.mark.parametrize("case", CALLS)
def test_a_request_takes_no_more_calls_than_it_is_allowed(
    in_process: ModuleType, case: str
) -> None:
    roles, everything = in_process.CASES[case]
    bench = in_process.Bench(roles, everything=everything)
    for _ in range(3):
        bench.serve(0)
    assert in_process.count_calls(lambda: bench.serve(0)) <= CALLS[case]


def test_a_token_takes_nine_calls_where_each_is_sent_by_itself(in_process: ModuleType) -> None:
    bench = in_process.Bench(("mixed",), everything=True)
    # The first stream with tokens learns their form.
    bench.serve(16)
    few, many = (in_process.count_calls(lambda n=n: bench.serve(n)) for n in (16, 26))
    assert many - few <= 9 * 10 + 2
