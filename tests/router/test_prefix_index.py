"""Where blocks of prompts are cached, in memory of fixed size."""

import os
import random

import pytest

from cleave.router.prefix_index import (
    INDEX_BYTES,
    NUM_BUCKETS,
    PrefixIndex,
    PrefixMemory,
    get_holder,
    get_stamp,
    to_holder,
)


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex(PrefixMemory())


def make_blocks(count: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.getrandbits(32) for _ in range(count)]


def list_uses(index: PrefixIndex, block: int) -> list[tuple[int, int]]:
    return sorted((get_holder(cell), get_stamp(cell)) for cell in index.list_uses(block))


def test_the_leading_blocks_of_each_engine_are_found_with_their_stamps(index) -> None:
    blocks = make_blocks(9)
    index.record(blocks[:7], 0, 11, 100)
    index.record(blocks[:3], 0, 12, 200)
    known, uses = index.find_known(blocks)
    assert (known, [get_holder(cell) for cell in uses]) == (7, [11])
    assert index.find_use(blocks, 9, 11) == (7, 100)
    assert index.find_use(blocks, 5, 11) == (5, 100)
    assert index.find_use(blocks, 9, 12) == (3, 200)
    assert index.find_use(blocks, 9, 13) == (0, 0)
    assert list_uses(index, blocks[2]) == [(11, 100), (12, 200)]


def test_the_last_known_block_is_found_wherever_it_is(index) -> None:
    for count in range(1, 57):
        blocks = make_blocks(count, seed=count)
        for known in range(count + 1):
            index.record(blocks[:known], max(known - 1, 0), 11, known)
            found, uses = index.find_known(blocks)
            assert found == known
            stamps = [get_stamp(cell) for cell in uses]
            assert stamps == ([known] if known else [])
            assert index.contains(blocks[0]) is (known > 0)


@pytest.mark.parametrize("tag", [0, 1, 3, 4, 0xFFFF])
def test_blocks_differ_by_all_their_bits(index, tag: int) -> None:
    block = tag << 16 | 9
    index.record([block], 0, 11, 100)
    for bit in range(32):
        other = block ^ 1 << bit
        assert not index.contains(other)
        index.record([other], 0, 12, 200)
        assert (list_uses(index, block), list_uses(index, other)) == ([(11, 100)], [(12, 200)])
        index.forget([other], 12)
    index.forget([block], 11)
    assert not index.contains(block)


def test_a_repeated_use_replaces_the_stamp(index) -> None:
    blocks = make_blocks(2)
    for clock in (1, 9):
        index.record(blocks, 0, 11, clock)
    assert list_uses(index, blocks[0]) == [(11, 9)]


def test_blocks_before_the_start_are_not_written(index) -> None:
    blocks = make_blocks(3)
    index.record(blocks, 2, 11, 5)
    assert [index.contains(each) for each in blocks] == [False, False, True]


def test_a_restarted_engine_has_another_number() -> None:
    numbers = {to_holder(f"{n:x}-boot") for n in range(1_000)}
    assert len(numbers) > 997


@pytest.mark.parametrize("count", [4, 5, 9, 40, 200])
def test_a_hot_block_is_found_at_each_of_its_engines_and_at_no_other(index, count: int) -> None:
    blocks = make_blocks(3)
    holders = range(1_000, 1_000 + count)
    for clock, holder in enumerate(holders):
        index.record(blocks, 0, holder, clock)
    found = [index.find_use(blocks, 3, holder) for holder in holders]
    assert found == [(3, clock) for clock in range(count)]
    assert not any(index.find_use(blocks, 3, holder)[0] for holder in range(5_000, 6_000))
    listed = {holder for holder, _ in list_uses(index, blocks[0])}
    assert min(count, 4) == len(listed)
    assert listed <= set(holders)


def test_of_a_hot_block_engines_that_used_it_lately_are_listed(index) -> None:
    (block,) = make_blocks(1)
    for clock in range(64):
        index.record([block], 0, 1_000 + clock, clock)
        assert 1_000 + clock in dict(list_uses(index, block))


def test_an_engine_uses_a_hot_block_again_with_a_new_stamp(index) -> None:
    (block,) = make_blocks(1)
    for round_ in range(3):
        for holder in range(1, 21):
            index.record([block], 0, holder, 100 * round_ + holder)
    assert [index.find_stamp(block, holder) for holder in range(1, 21)] == list(range(201, 221))


@pytest.mark.parametrize("clock", range(120, 128))
def test_in_a_full_bucket_engines_that_are_gone_are_overwritten_first(index, clock: int) -> None:
    blocks = [5 | tag << 16 for tag in range(1, 9)]
    for number, block in enumerate(blocks):
        index.record([block], 0, 1 + number % 2, 100 + number)
    index.retain({2: None})
    index.record([5 | 20 << 16], 0, 2, clock)
    left = [index.contains(each) for each in blocks]
    assert left[1::2] == [True] * 4, "those of engine 2 stay"
    assert left[::2].count(False) == 1


@pytest.mark.parametrize("clock", range(120, 128))
def test_in_a_full_bucket_the_oldest_of_three_is_overwritten(index, clock: int) -> None:
    blocks = [5 | tag << 16 for tag in range(1, 9)]
    for number, block in enumerate(blocks):
        index.record([block], 0, 1, 100 + number)
    index.record([5 | 20 << 16], 0, 1, clock)
    left = [index.contains(each) for each in blocks]
    assert left.count(False) == 1
    assert left[-2:] == [True, True], "there are always two older ones"


def test_the_index_takes_no_more_memory_as_more_is_recorded(index) -> None:
    assert INDEX_BYTES == 4 << 20
    rng = random.Random(2)
    for holder in range(50):
        index.record([rng.getrandbits(32) for _ in range(200)], 0, holder, holder)
    assert NUM_BUCKETS * 64 == INDEX_BYTES == len(index._memory)
    recent = make_blocks(4, 9)
    index.record(recent, 0, 3, 900)
    assert index.find_known(recent)[0] == 4


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
        PrefixIndex(memory).record(blocks, 0, 11, 7)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert index.find_use(blocks, 5, 11) == (5, 7)
