"""Who has computed the beginning of a prompt."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cleave.policy.dispatch import NONE
from cleave.policy.prefix_cache import (
    BLOCK_BYTES,
    TOKENS_PER_BLOCK,
    PrefixIndex,
    find_least_uncached,
    hash_blocks,
)


def text(*blocks: str) -> bytes:
    return b"".join(block.encode() * BLOCK_BYTES for block in blocks)


def count(index: PrefixIndex, holder: str, prompt: bytes) -> int:
    found = index.find(hash_blocks(prompt))
    return next((depth for depth, holders in found if holder in holders), 0)


def test_only_whole_blocks_are_hashed() -> None:
    assert len(hash_blocks(text("a", "b") + b"rest")) == 2
    assert hash_blocks(b"short") == []


def test_equal_beginnings_have_equal_hashes_and_nothing_after_a_difference_has() -> None:
    one, other = hash_blocks(text("a", "b", "c")), hash_blocks(text("a", "x", "c"))
    assert one[0] == other[0]
    assert one[1] != other[1]
    assert one[2] != other[2], "hashes are chained"


def test_the_longest_known_beginning_is_found_for_each_holder() -> None:
    index = PrefixIndex()
    index.add("p1", hash_blocks(text("a", "b", "c")), 100)
    index.add("p2", hash_blocks(text("a", "x")), 100)
    prompt = text("a", "b", "c", "d")
    assert [count(index, holder, prompt) for holder in ("p1", "p2", "p3")] == [3, 1, 0]


def test_the_oldest_blocks_go_first_and_the_first_of_a_prompt_last() -> None:
    index = PrefixIndex()
    index.add("p", hash_blocks(text("a", "b", "c")), 4)
    index.add("p", hash_blocks(text("k", "l")), 4)
    assert count(index, "p", text("a", "b", "c")) == 2
    assert count(index, "p", text("k", "l")) == 2


def test_engines_that_are_gone_are_forgotten() -> None:
    index = PrefixIndex()
    for holder in ("p1", "p2"):
        index.add(holder, hash_blocks(text("a")), 10)
    index.retain({"p2"})
    assert (count(index, "p1", text("a")), count(index, "p2", text("a"))) == (0, 1)
    index.retain(())
    assert len(index) == 0
    assert list(index.find(hash_blocks(text("a")))) == []


def test_cached_tokens_are_subtracted_from_the_queue() -> None:
    found = [(4, {"p2"}), (1, {"p1", "p2"})]
    slots = {"p1": 0, "p2": 1, "p3": 2}
    cached = 4 * TOKENS_PER_BLOCK
    for scores, slot in (
        ([100.0, cached + 50.0, 60.0], 0),
        ([900.0, cached + 50.0, 60.0], 1),
        ([900.0, cached + 90.0, 60.0], 2),
        ([90.0, cached + 50.0, 160.0], 0),
    ):
        assert find_least_uncached(np.array(scores), list(slots).__getitem__, slots, found) == slot


def test_a_closed_holder_is_not_found() -> None:
    slots, found = {"p1": 0, "p2": 1}, [(9, {"p1"})]
    assert find_least_uncached(np.array([np.inf, 5.0]), ["p1", "p2"].__getitem__, slots, found) == 1
    assert find_least_uncached(np.array([np.inf]), ["p1"].__getitem__, slots, found) == NONE


@given(
    st.lists(st.floats(0, 5_000), min_size=1, max_size=8),
    st.lists(st.sets(st.integers(0, 7)), max_size=6),
)
def test_no_open_instance_is_better(values: list[float], levels: list[set[int]]) -> None:
    # Who has a block has those before it.
    holders = [set.union(*levels[at:]) for at in range(len(levels))]
    found = [(at + 1, {str(i) for i in holders[at]}) for at in reversed(range(len(levels)))]
    depth = [sum(i in each for each in holders) for i in range(len(values))]
    slots = {str(i): i for i in range(len(values))}
    slot = find_least_uncached(np.array(values), str, slots, found)
    effort = [value - TOKENS_PER_BLOCK * d for value, d in zip(values, depth, strict=True)]
    assert effort[slot] == min(effort)
