"""Prompts as blocks, whether prompts repeat, and how long blocks stay cached."""

import itertools
import random

import pytest

from cleave.policy.prefix_cache import (
    BLOCK_ENDS,
    CLOCK_BITS,
    FIRST_BLOCK_BYTES,
    MAX_PROMPT_BYTES,
    WHOLE_BYTES,
    RepeatDetector,
    estimate_cached_tokens,
    hash_alike,
    hash_blocks,
    hash_first_block,
    is_cached,
)


def text(*blocks: str) -> bytes:
    return b"".join(block.encode() * FIRST_BLOCK_BYTES for block in blocks)


def hash_all(prompt: bytes) -> list[int]:
    return hash_blocks(prompt, 7)


def test_only_whole_blocks_are_hashed() -> None:
    assert len(hash_all(text("a", "b") + b"rest")) == 2
    assert len(hash_all(text("a", "b"))) == 1, "the last byte closes the text"
    assert len(hash_all(text("a", "b") + b"]")) == 2


def test_equal_beginnings_have_equal_hashes_and_nothing_after_a_difference_has() -> None:
    one, other = hash_all(text("a", "b", "c", "]")), hash_all(text("a", "x", "c", "]"))
    assert one[0] == other[0]
    assert one[1] != other[1]
    assert one[2] != other[2], "hashes are chained"


def test_the_first_hash_is_that_of_the_first_block() -> None:
    prompt = random.Random(1).randbytes(4_000)
    assert hash_first_block(prompt, 7) == hash_all(prompt)[0]


def test_tenants_have_hashes_of_their_own() -> None:
    prompt = random.Random(1).randbytes(4_000)
    assert not set(hash_blocks(prompt, 1)) & set(hash_blocks(prompt, 2))


def test_a_view_of_a_text_has_the_hashes_of_the_text() -> None:
    prompt = random.Random(1).randbytes(50_000)
    assert hash_blocks(memoryview(prompt), 7) == hash_all(prompt)
    assert hash_first_block(memoryview(prompt), 7) == hash_all(prompt)[0]


@pytest.mark.parametrize("position", [3_000, 20_000, 47_000, 200_000])
def test_text_that_is_inserted_anywhere_changes_all_hashes_from_there_on(position: int) -> None:
    prompt = random.Random(1).randbytes(300_000)
    before = sum(end <= position for end in BLOCK_ENDS)
    for size in (1, 40, 5_000):
        other = prompt[:position] + bytes(size) + prompt[position:]
        pairs = list(zip(hash_all(prompt), hash_all(other), strict=False))
        assert [one == two for one, two in pairs] == [at < before for at in range(len(pairs))]


@pytest.mark.parametrize(
    ("position", "is_noticed"),
    [(0, True), (WHOLE_BYTES - 1_024, True), (WHOLE_BYTES, False), (9 * 1_024 - 1, True)],
)
def test_a_text_of_equal_length_is_noticed_in_first_blocks_and_at_ends_of_later_ones(
    position: int, is_noticed: bool
) -> None:
    prompt = random.Random(1).randbytes(50_000)
    other = bytearray(prompt)
    other[position] ^= 1
    assert (hash_all(prompt) != hash_all(bytes(other))) is is_noticed


def test_what_gateways_compare_depends_on_one_block() -> None:
    one, other = text("a", "b", "c"), text("x", "b", "y")
    assert hash_alike(one, 1) == hash_alike(other, 1) == hash_alike(text("b"), 0)
    # The same in all gateways, although each has a secret of its own.
    assert hash_alike(text("a"), 0) == 2_841_147_932


def test_a_longer_prompt_has_the_blocks_of_the_shorter_one() -> None:
    rng = random.Random(1)
    prompt = rng.randbytes(100_000)
    short, long = hash_all(prompt[:61_000]), hash_all(prompt)
    assert long[: len(short)] == short


def test_blocks_grow_with_the_prompt_to_an_eighth_of_the_position() -> None:
    ends = [0, *BLOCK_ENDS]
    sizes = [end - start for start, end in itertools.pairwise(ends)]
    assert sizes == sorted(sizes)
    assert all(
        size <= max(FIRST_BLOCK_BYTES, end / 8) for size, end in zip(sizes, BLOCK_ENDS, strict=True)
    )
    assert len(BLOCK_ENDS) == 56
    assert BLOCK_ENDS[-1] == MAX_PROMPT_BYTES


def test_text_beyond_the_limit_costs_nothing() -> None:
    assert len(hash_all(bytes(2 * MAX_PROMPT_BYTES))) == len(BLOCK_ENDS)


def test_cached_tokens_are_those_of_the_blocks_and_of_half_the_next_one() -> None:
    assert estimate_cached_tokens(0, 4_096, 1_000) == 0
    assert estimate_cached_tokens(2, 4_096, 1_000) == 625
    assert estimate_cached_tokens(4, 4_097, 1_000) == pytest.approx(1_000, rel=0.001)
    assert estimate_cached_tokens(len(BLOCK_ENDS), 2 * MAX_PROMPT_BYTES, 1_000) == 750


@pytest.mark.parametrize(
    ("clock", "stamp", "expected"),
    [(10, 10, True), (109, 10, True), (110, 10, False), (5, (1 << CLOCK_BITS) - 5, True)],
)
def test_a_block_is_cached_until_the_kv_was_filled_again(
    clock: int, stamp: int, expected: bool
) -> None:
    assert is_cached(clock, stamp, 100) is expected


def test_new_prompts_switch_it_off_and_repeated_ones_on_again() -> None:
    for tokens in (100.0, 10_000.0):
        detector = RepeatDetector()
        assert detector.is_repeating, "the first conversations count"
        for number in range(200):
            assert detector.is_repeating is (number < 147)
            detector.observe(tokens, 0.0)
        for _ in range(5):
            detector.observe(tokens, tokens)
        for _ in range(100):
            detector.observe(tokens, 0.0)
            assert detector.is_repeating, "most are not known yet"


def test_a_few_long_prompts_that_repeat_count_more_than_many_short_new_ones() -> None:
    detector = RepeatDetector()
    for _ in range(100):
        for _ in range(30):
            detector.observe(300.0, 0.0)
        detector.observe(3_000.0, 2_900.0)
    assert detector.is_repeating
