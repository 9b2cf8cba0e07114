"""Where blocks of prompts are cached, in memory of fixed size."""

import os
import random

import pytest

from cleave.router.prefix_index import (
    EVERYWHERE_S,
    INDEX_BYTES,
    NUM_BUCKETS,
    PrefixIndex,
    PrefixMemory,
    to_holder,
)


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex(PrefixMemory())


def make_blocks(count: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.getrandbits(32) for _ in range(count)]


def test_the_leading_blocks_of_each_engine_are_found_with_their_stamps(index) -> None:
    blocks = make_blocks(9)
    index.record(blocks[:7], 0, 11, 100, 0)
    index.record(blocks[:3], 0, 12, 200, 0)
    assert index.count_known(blocks) == 7
    assert index.find_use(blocks, 11, 100, 0) == (7, 100)
    assert index.find_use(blocks, 12, 200, 0) == (3, 200)
    assert index.find_use(blocks, 13, 0, 0) == (0, 0)
    assert sorted(index.list_uses(blocks[2])) == [(11, 100), (12, 200)]


def test_a_repeated_use_replaces_the_stamp(index) -> None:
    blocks = make_blocks(2)
    for clock in (1, 9):
        index.record(blocks, 0, 11, clock, 0)
    assert index.list_uses(blocks[0]) == [(11, 9)]


def test_blocks_before_the_start_are_not_written(index) -> None:
    blocks = make_blocks(3)
    index.record(blocks, 2, 11, 5, 0)
    assert [index.contains(each) for each in blocks] == [False, False, True]


def test_a_restarted_engine_has_another_number() -> None:
    numbers = {to_holder(f"{n:x}-boot") for n in range(1_000)}
    assert len(numbers) > 997


def test_a_block_of_more_engines_than_cells_counts_as_cached_by_all_for_a_while(index) -> None:
    (block,) = make_blocks(1)
    for holder in range(1, 10):
        index.record([block], 0, holder, 10 * holder, 1_000)
    assert index.find_use([block], 77, 5, 1_001) == (1, 5)
    assert index.find_use([block], 77, 5, 1_000 + EVERYWHERE_S) == (0, 0)
    index.record([block], 0, 77, 5, 1_001)
    assert 77 not in dict(index.list_uses(block)), "nothing needs to be written"
    index.record([block], 0, 77, 6, 1_000 + EVERYWHERE_S)
    assert dict(index.list_uses(block))[77] == 6


@pytest.mark.parametrize("clock", range(120, 128))
def test_in_a_full_bucket_engines_that_are_gone_are_overwritten_first(index, clock: int) -> None:
    blocks = [5 | tag << 16 for tag in range(1, 9)]
    for number, block in enumerate(blocks):
        index.record([block], 0, 1 + number % 2, 100 + number, 0)
    index.retain({2: None})
    index.record([5 | 20 << 16], 0, 2, clock, 0)
    left = [index.contains(each) for each in blocks]
    assert left[1::2] == [True] * 4, "those of engine 2 stay"
    assert left[::2].count(False) == 1


@pytest.mark.parametrize("clock", range(120, 128))
def test_in_a_full_bucket_the_oldest_of_three_is_overwritten(index, clock: int) -> None:
    blocks = [5 | tag << 16 for tag in range(1, 9)]
    for number, block in enumerate(blocks):
        index.record([block], 0, 1, 100 + number, 0)
    index.record([5 | 20 << 16], 0, 1, clock, 0)
    left = [index.contains(each) for each in blocks]
    assert left.count(False) == 1
    assert left[-2:] == [True, True], "there are always two older ones"


def test_the_index_takes_no_more_memory_as_more_is_recorded(index) -> None:
    assert INDEX_BYTES == 4 << 20
    rng = random.Random(2)
    for holder in range(50):
        index.record([rng.getrandbits(32) for _ in range(200)], 0, holder, holder, 0)
    assert NUM_BUCKETS * 64 == INDEX_BYTES == len(index._memory)
    recent = make_blocks(4, 9)
    index.record(recent, 0, 3, 900, 0)
    assert index.count_known(recent) == 4


def test_salts_and_models_have_blocks_of_their_own_and_a_secret_hides_them() -> None:
    memory = PrefixMemory()
    one, same = PrefixIndex(memory), PrefixIndex(memory)
    seeds = {one.find_seed(model, salt) for model in ("m", "n") for salt in (b"", b"a", b"b")}
    assert len(seeds) == 6
    assert same.find_seed("m", b"a") == one.find_seed("m", b"a"), "all processes agree"
    assert PrefixIndex(PrefixMemory()).find_seed("m", b"a") not in seeds, "gateways do not"


def test_long_salts_are_not_kept(index) -> None:
    seeds = {index.find_seed("m", b"x" * 100_000 + b"%d" % n) for n in range(10)}
    assert len(seeds) == 10
    assert all(len(salt) < 512 for _, salt in index._seeds)


def test_the_number_of_salts_is_limited(index) -> None:
    before = index.find_seed("m", b"0")
    for number in range(5_000):
        index.find_seed("m", b"%d" % number)
    assert len(index._seeds) <= 4_096
    assert index.find_seed("m", b"0") == before


def test_processes_see_what_another_one_records() -> None:
    memory = PrefixMemory()
    index, blocks = PrefixIndex(memory), make_blocks(5)
    pid = os.fork()
    if not pid:
        PrefixIndex(memory).record(blocks, 0, 11, 7, 0)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert index.find_use(blocks, 11, 7, 0) == (5, 7)
