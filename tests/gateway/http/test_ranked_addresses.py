"""Addresses by rank, beside a list that is sorted each time."""

import math

from hypothesis import given
from hypothesis import strategies as st

from cleave.gateway.http.ranked_addresses import RankedAddresses

STEPS = st.lists(st.tuples(st.sampled_from("abcdef"), st.none() | st.integers(-3, 3)), max_size=60)


@given(STEPS)
def test_the_lowest_is_first_and_equal_ones_are_in_the_order_of_their_last_turns(steps) -> None:
    ranked, reference = RankedAddresses(), []
    for address, rank in steps:
        known = [each for each in reference if each[0] == address]
        if rank is None:
            ranked.remove(address)
        else:
            ranked.rank(address, rank)
        if rank is None or known != [(address, rank)]:
            reference = [each for each in reference if each[0] != address]
            reference += [(address, rank)] if rank is not None else []
        reference.sort(key=lambda each: each[1])
        assert list(ranked.take_turns(1)) == [each for each, rank in reference if rank <= 1]
        if reference:
            first = next(ranked.take_turns(math.inf))
            assert first == reference[0][0]
            reference.append(reference.pop(0))
        assert len(ranked) == len(reference)
    for address, _ in reference:
        ranked.remove(address)
    assert not ranked._by_rank
