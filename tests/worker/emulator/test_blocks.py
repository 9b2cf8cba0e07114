"""The block pool."""

from cleave_worker.emulator.blocks import BlockPool
from cleave_worker.scheduling.block_uses import BlockUses


def test_blocks_are_allocated_once_and_freed() -> None:
    pool = BlockPool(5, 4)
    allocated = pool.allocate(3)
    assert len({*allocated, *pool.allocate(2)}) == 5
    assert pool.num_free == 0
    pool.free(allocated)
    assert pool.num_free == 3


def test_a_shared_block_is_free_when_its_last_user_is_gone() -> None:
    pool = BlockPool(5, 4)
    (block,) = pool.allocate(1)
    pool.publish(block, b"key")
    assert pool.acquire_cached([b"key", b"other"]) == [block]
    pool.free([block])
    assert pool.num_free == 4
    pool.free([block])
    assert pool.num_free == 5


def test_a_freed_prefix_is_found_until_its_blocks_are_needed() -> None:
    pool = BlockPool(2, 4)
    blocks = pool.allocate(2)
    for block, key in zip(blocks, (b"1", b"2"), strict=True):
        pool.publish(block, key)
    pool.free(blocks)
    pool.allocate(1)
    assert pool.acquire_cached([b"1", b"2"]) == blocks[:1], "the end of a prefix is reused first"
    pool.free(blocks[:1])
    pool.allocate(1)
    assert pool.acquire_cached([b"1"]) == []


def test_blocks_that_are_not_cached_are_reused_before_a_freed_prefix() -> None:
    pool = BlockPool(3, 4)
    cached, other = pool.allocate(2)
    pool.publish(cached, b"1")
    pool.free([cached, other])
    assert other in pool.allocate(2)
    assert pool.acquire_cached([b"1"]) == [cached]


def test_the_pool_knows_its_oldest_use() -> None:
    pool, now_ns = BlockPool(2, 4), 10
    pool.uses = BlockUses(lambda: now_ns)
    assert pool.uses.oldest_ns == 0
    first, second = pool.allocate(2)
    pool.publish(first, b"1")
    pool.publish(second, b"2")
    pool.free([first, second])
    now_ns = 20
    assert pool.acquire_cached([b"1"]) == [first]
    assert pool.uses.oldest_ns == 10
    now_ns = 30
    assert pool.allocate(1) == [second]
    assert pool.uses.oldest_ns == 20, "in use since then"


def test_the_first_block_of_equal_content_stays_the_cached_one() -> None:
    pool = BlockPool(3, 4)
    first, second = pool.allocate(2)
    pool.publish(first, b"key")
    pool.publish(second, b"key")
    assert pool.acquire_cached([b"key"]) == [first]


def test_a_block_remembers_what_it_held_before() -> None:
    pool = BlockPool(1, 4)
    (block,) = pool.allocate(1)
    pool.contents[block] = 7
    pool.free([block])
    pool.allocate(1)
    assert (pool.previous_contents[block], pool.contents[block]) == (7, 0)
