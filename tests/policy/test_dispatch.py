"""Least pending tokens over masked arrays."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cleave.policy.dispatch import NONE, choose_pair, close_slots, find_least

INF = np.inf
tokens = st.one_of(st.just(INF), st.floats(0, 1e7))


def scores(*values: float):
    return np.array(values, dtype=np.float64)


def test_the_least_pending_instance_is_found() -> None:
    assert find_least(scores(300, 100, 200)) == 1


def test_a_closed_instance_is_never_found() -> None:
    assert find_least(scores(INF, 900, INF)) == 1


def test_nothing_is_found_when_all_are_closed_or_there_are_none() -> None:
    assert find_least(scores(INF, INF)) == NONE
    assert find_least(scores()) == NONE


def test_prefill_and_decode_are_chosen_each_by_its_own_queue() -> None:
    pair = choose_pair(
        prefill=scores(50, 10, INF, INF),
        decode=scores(INF, INF, 900, 800),
        mixed=scores(INF, INF, INF, INF),
        pending_prompt=scores(50, 10, 0, 0),
    )
    assert pair == (1, 3)


def test_without_a_decode_instance_no_prefill_is_chosen() -> None:
    closed = scores(INF, INF)
    assert choose_pair(scores(0, INF), closed, closed, scores(0, 0)) == (NONE, NONE)


def test_a_mixed_instance_serves_whole_when_its_prompt_queue_is_shorter() -> None:
    decode = scores(INF, 0, 5_000)
    mixed = scores(INF, INF, 5_000)
    assert choose_pair(scores(400, INF, INF), decode, mixed, scores(400, 0, 100)) == (NONE, 2)
    assert choose_pair(scores(400, INF, INF), decode, mixed, scores(400, 0, 500)) == (0, 1)


def test_equal_queues_are_split_as_planned() -> None:
    prefill, decode, mixed = scores(0, INF, INF), scores(INF, 0, 9), scores(INF, INF, 9)
    assert choose_pair(prefill, decode, mixed, np.zeros(3)) == (0, 1)


def test_mixed_serves_alone_when_it_is_all_there_is() -> None:
    assert choose_pair(scores(INF), scores(7), scores(7), scores(0)) == (NONE, 0)


def test_closing_slots_leaves_the_original_untouched() -> None:
    original = scores(1, 2, 3)
    assert find_least(close_slots(original, [0, 1])) == 2
    assert find_least(original) == 0


@given(st.lists(tokens, max_size=50))
def test_whatever_is_found_is_open_and_nothing_open_is_less(values: list[float]) -> None:
    slot = find_least(scores(*values))
    open_values = [value for value in values if value < INF]
    if slot == NONE:
        assert not open_values
    else:
        assert values[slot] == min(open_values)
