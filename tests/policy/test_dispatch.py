"""Least pending tokens over masked arrays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.api.enums import DispatchPolicy
from cleave.policy.dispatch import (
    NONE,
    RULES,
    STALE_PENALTY,
    TO_DECODE,
    TO_PREFILL,
    TO_WHOLE,
    ScoreColumn,
    add_cell_costs,
    choose_least_pair,
    close_slots,
    compute_headroom,
    compute_heavy_ratio,
    compute_kv_weight,
    computes_short,
    draw,
    find_least,
    restrict_to_cell,
    sample_least,
    sample_least_heavy,
    select_pair,
    settle,
)

INF = np.inf
tokens = st.one_of(st.just(INF), st.floats(0, 1e7))


def scores(*values: float):
    return np.array(values, dtype=np.float64)


class Column(ScoreColumn):
    def __init__(self, *values: float) -> None:
        super().__init__(len(values))
        self.values = scores(*values)

    def get_score(self, slot: int) -> float:
        return self.values[slot]

    def find_least(self) -> int:
        return find_least(self.values)


def least_pair(*columns: Column, headroom: float = 0.0) -> tuple[int, int]:
    """The result of the fast search, compared with the full one."""
    spare = Column(*[headroom] * columns[0].size)
    chosen = choose_least_pair(*columns, spare)
    by_purpose = dict(zip((TO_PREFILL, TO_DECODE, TO_WHOLE), columns, strict=False))

    def find(purpose: int, request: None, first: int) -> int:
        return by_purpose[purpose].find_least()

    def count(request: None, slot: int) -> float:
        return 0.0

    assert select_pair(find, count, None, columns[1], columns[3], spare) == chosen
    return chosen


def test_every_policy_has_a_rule() -> None:
    assert list(RULES) == list(DispatchPolicy)


def test_the_least_pending_instance_is_found() -> None:
    assert find_least(scores(300, 100, 200)) == 1


def test_a_closed_instance_is_never_found() -> None:
    assert find_least(scores(INF, 900, INF)) == 1


def test_nothing_is_found_when_all_are_closed_or_there_are_none() -> None:
    assert find_least(scores(INF, INF)) == NONE
    assert find_least(scores()) == NONE


def test_prefill_and_decode_are_chosen_each_by_its_own_queue() -> None:
    pair = least_pair(
        Column(50, 10, INF, INF),
        Column(INF, INF, 900, 800),
        Column(INF, INF, INF, INF),
        Column(50, 10, 0, 0),
    )
    assert pair == (1, 3)


def test_without_a_decode_instance_no_prefill_is_chosen() -> None:
    closed = Column(INF, INF)
    assert least_pair(Column(0, INF), closed, closed, Column(0, 0)) == (NONE, NONE)


def test_a_mixed_instance_serves_whole_when_its_prompt_queue_is_shorter() -> None:
    decode = Column(INF, 0, 5_000)
    mixed = Column(INF, INF, 5_000)
    assert least_pair(Column(400, INF, INF), decode, mixed, Column(400, 0, 100)) == (NONE, 2)
    assert least_pair(Column(400, INF, INF), decode, mixed, Column(400, 0, 500)) == (0, 1)


def test_what_a_mixed_or_prefill_instance_has_cached_of_the_prompt_shortens_its_queue() -> None:
    decode, waiting, none = Column(INF, 0, 9), Column(400, 0, 500), Column(0, 0, 0)
    assert settle(0, 1, 2, decode, waiting, none, 0.0, 0.0) == (0, 1)
    assert settle(0, 1, 2, decode, waiting, none, 0.0, 102.0) == (NONE, 2)
    assert settle(0, 1, 2, decode, waiting, none, 50.0, 102.0) == (0, 1)


def test_prompts_leave_a_mixed_instance_to_its_decodes_while_the_prefill_queue_has_headroom() -> (
    None
):
    decode, mixed, waiting = Column(INF, 0, 9), Column(INF, INF, 9), Column(1_000, 0, 100)
    prefill = Column(400, INF, INF)
    assert least_pair(prefill, decode, mixed, waiting, headroom=900) == (0, 1)
    assert least_pair(prefill, decode, mixed, waiting, headroom=890) == (NONE, 2)


def test_headroom_keeps_no_prompt_at_a_stale_instance() -> None:
    decode, mixed, waiting = Column(INF, 0, 9), Column(INF, INF, 9), Column(STALE_PENALTY, 0, 100)
    prefill = Column(STALE_PENALTY, INF, INF)
    assert least_pair(prefill, decode, mixed, waiting, headroom=2e9) == (NONE, 2)
    stale_too = Column(STALE_PENALTY, 0, STALE_PENALTY + 100)
    assert least_pair(prefill, decode, mixed, stale_too, headroom=2e9) == (0, 1)


def test_headroom_is_what_a_prefill_instance_computes_in_the_time() -> None:
    assert compute_headroom(1_000.0, 0.1) == pytest.approx(10_000)
    assert compute_headroom(0.0, 0.1) == 0.0
    assert compute_headroom(1_000.0, 0.0) > 1e8, "prompts seem to take no time"


def test_equal_queues_are_split_as_planned() -> None:
    prefill, decode, mixed = Column(0, INF, INF), Column(INF, 0, 9), Column(INF, INF, 9)
    assert least_pair(prefill, decode, mixed, Column(0, 0, 0)) == (0, 1)


def test_mixed_serves_alone_when_it_is_all_there_is() -> None:
    assert least_pair(Column(INF), Column(7), Column(7), Column(0)) == (NONE, 0)


def test_a_decode_instance_computes_a_prompt_that_is_short_and_would_wait() -> None:
    assert computes_short(80, 20, 80, 100)
    assert not computes_short(80, 21, 80, 100)
    assert not computes_short(80, 20, 79, 100)
    assert computes_short(80, 20, INF, 100)


def test_closing_slots_leaves_the_original_untouched() -> None:
    original = scores(1, 2, 3)
    assert find_least(close_slots(original, [0, 1])) == 2
    assert find_least(original) == 0


@given(st.lists(tokens, max_size=50))
def test_the_least_open_instance_is_found(values: list[float]) -> None:
    slot = find_least(scores(*values))
    open_values = [value for value in values if value < INF]
    if slot == NONE:
        assert not open_values
    else:
        assert values[slot] == min(open_values)


@given(st.integers(1, 2**31 - 2), st.integers(1, 5_000))
def test_a_draw_stays_below_its_count_and_gives_a_seed_for_the_next(seed: int, count: int) -> None:
    following, number = draw(seed, count)
    assert 0 <= number < count
    assert 0 < following < 2**31 - 1


def test_random_dispatch_takes_every_open_instance_about_as_often() -> None:
    seed, picks = 7, [0] * 4
    for _ in range(3_000):
        slot, seed = sample_least(scores(5, INF, 900, 70), 1, seed)
        picks[slot] += 1
    assert picks[1] == 0
    assert all(abs(count - 1_000) < 120 for count in (picks[0], *picks[2:]))


def test_of_two_choices_the_less_pending_is_picked_and_the_most_pending_never() -> None:
    seed, picks = 7, [0] * 4
    for _ in range(3_000):
        slot, seed = sample_least(scores(10, 20, 30, 40), 2, seed)
        picks[slot] += 1
    assert picks[0] > picks[1] > picks[2] > picks[3] == 0


def test_a_sample_falls_back_to_the_least_of_all_when_all_are_closed_or_in_doubt() -> None:
    assert sample_least(scores(INF, INF), 2, 1)[0] == NONE
    assert sample_least(scores(), 2, 1)[0] == NONE
    assert sample_least(scores(STALE_PENALTY + 9, STALE_PENALTY + 3), 2, 1)[0] == 1
    assert sample_least(scores(INF, INF, 5), 2, 1)[0] == 2


@given(st.lists(tokens, max_size=30), st.integers(1, 2**31 - 2), st.integers(1, 3))
def test_a_sample_is_open(values: list[float], seed: int, size: int) -> None:
    slot, _ = sample_least(scores(*values), size, seed)
    assert (slot == NONE) == all(value == INF for value in values)
    assert slot == NONE or values[slot] < INF


def test_a_heavy_decode_goes_where_the_ratio_of_heavy_to_light_is_least() -> None:
    heaviness = scores(
        compute_heavy_ratio(8, 2), compute_heavy_ratio(2, 8), compute_heavy_ratio(5, 5)
    )
    seed, pairs = 3, set()
    for _ in range(200):
        slot, seed = sample_least_heavy(scores(1, 3, 2), scores(9, 9, 9), heaviness, 5, 500, seed)
        pairs.add(slot)
    assert pairs == {1, 2}, "of two drawn ones the first is never the lighter"


def test_a_light_decode_goes_where_fewest_tokens_are_at_any_ratio() -> None:
    room, heaviness, seed = scores(9_000, 9_000), scores(0, 5), 3
    for _ in range(50):
        slot, seed = sample_least_heavy(scores(30, 10), room, heaviness, 5, 100, seed)
        assert slot == 1
        slot, seed = sample_least_heavy(scores(30, 10), room, heaviness, 5, 200, seed)
        assert slot == 0


def test_only_instances_with_room_are_drawn_while_there_are_any() -> None:
    room, heaviness = scores(100, 900, 50), scores(0, 5, 0)
    for seed in range(1, 60):
        assert sample_least_heavy(scores(1, 2, 3), room, heaviness, 500, 200, seed)[0] == 1
        assert sample_least_heavy(scores(1, 2, 3), room, heaviness, 5_000, 200, seed)[0] == 0


PAIRS = np.array([0, 0, 1, 1])
"""Two cells, each with a prefill and a decode instance."""


def pair(prefill, decode, weight: float = 0.1, crossing: float = 100) -> tuple[int, int]:
    first = find_least(add_cell_costs(prefill, decode, PAIRS, weight, crossing))
    return first, find_least(restrict_to_cell(decode, PAIRS, first)) if first != NONE else NONE


def test_a_pair_stays_in_its_cell_despite_idle_instances_elsewhere() -> None:
    assert pair(scores(10, INF, 20, INF), scores(INF, 50, INF, 0)) == (0, 1)


def test_a_cell_whose_decode_side_is_full_gets_less() -> None:
    assert pair(scores(10, INF, 20, INF), scores(INF, 500, INF, 0)) == (2, 3)


def test_a_prompt_leaves_its_cell_only_where_that_lacks_decode_and_waiting_costs_more() -> None:
    decode = scores(INF, INF, INF, 500)
    assert pair(scores(0, INF, 99, INF), decode) == (2, 3)
    assert pair(scores(0, INF, 101, INF), decode) == (0, 3)
    assert pair(scores(0, INF, INF, INF), decode) == (0, 3)


def test_decode_instances_in_doubt_count_as_gone_while_others_are_heard() -> None:
    decode = scores(INF, STALE_PENALTY, INF, 500)
    assert pair(scores(0, INF, 99, INF), decode) == (2, 3)
    assert pair(scores(0, INF, INF, INF), decode) == (0, 3)
    assert pair(scores(0, INF, INF, INF), scores(INF, STALE_PENALTY + 9, INF, STALE_PENALTY)) == (
        0,
        1,
    )


@given(
    st.lists(tokens, min_size=4, max_size=4),
    st.lists(tokens, min_size=4, max_size=4),
    st.lists(st.integers(0, 3), min_size=4, max_size=4),
)
def test_with_cells_an_open_instance_is_found_and_cells_are_left_only_where_they_lack_decode(
    prefill: list[float], decode: list[float], cells: list[int]
) -> None:
    weighed = add_cell_costs(scores(*prefill), scores(*decode), np.array(cells), 0.1, 100)
    if min(decode) == INF:
        assert find_least(weighed) == NONE
        return
    assert np.array_equal(np.isfinite(weighed), np.isfinite(scores(*prefill)))
    for slot in range(4):
        second = find_least(restrict_to_cell(scores(*decode), np.array(cells), slot))
        own = [d for d, cell in zip(decode, cells, strict=True) if cell == cells[slot]]
        assert decode[second] == (min(own) if min(own) < INF else min(decode))


def test_resident_tokens_count_by_the_share_of_the_kv_that_they_take() -> None:
    small, large = compute_kv_weight(10_000, 80_000), compute_kv_weight(80_000, 80_000)
    assert 5_000 * small == 40_000 * large
    assert compute_kv_weight(160_000, 80_000) == 1.0
    assert compute_kv_weight(0, 10**18) * 10**6 < STALE_PENALTY
