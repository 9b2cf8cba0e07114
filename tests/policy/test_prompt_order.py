"""Prompts in order of arrival, shortest first or longest first."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cleave.policy.prompt_order import PrefillOrder, sort_prompts

lengths = st.lists(st.integers(1, 5), min_size=1, max_size=20)


def arrange(tokens: list[int], order: PrefillOrder) -> tuple[list[int], list[int]]:
    numbers, lengths = np.arange(len(tokens)), np.array(tokens)
    sort_prompts(numbers, lengths, order)
    return numbers.tolist(), lengths.tolist()


def test_first_come_first_served_leaves_all_in_place() -> None:
    assert arrange([3, 1, 2], PrefillOrder.FCFS) == ([0, 1, 2], [3, 1, 2])


def test_the_shortest_goes_first_and_the_longest_goes_first() -> None:
    assert arrange([3, 1, 2], PrefillOrder.SJF) == ([1, 2, 0], [1, 2, 3])
    assert arrange([3, 1, 2], PrefillOrder.LJF) == ([0, 2, 1], [3, 2, 1])


@given(lengths)
def test_equal_prompts_keep_the_order_in_which_they_came(tokens: list[int]) -> None:
    numbers = range(len(tokens))
    assert arrange(tokens, PrefillOrder.SJF)[0] == sorted(numbers, key=lambda n: tokens[n])
    assert arrange(tokens, PrefillOrder.LJF)[0] == sorted(numbers, key=lambda n: -tokens[n])
