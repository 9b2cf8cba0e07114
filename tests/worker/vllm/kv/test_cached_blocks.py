"""vLLM's own block pool, leased to other engines: what is found, kept, and given back."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [
    pytest.mark.vllm,
    # vLLM and what it imports warn of their own future.
    pytest.mark.filterwarnings("ignore"),
]
BLOCK_SIZE = 4
NUM_BLOCKS = 17
KEYS = [bytes([number]) * 32 for number in range(12)]


@pytest.fixture
def pool() -> Any:
    block_pool = pytest.importorskip("vllm.v1.core.block_pool", reason="needs the group worker-cpu")
    return block_pool.BlockPool(NUM_BLOCKS, enable_caching=True, hash_block_size=BLOCK_SIZE)


@pytest.fixture
def lock(pool: Any) -> Any:
    from cleave_worker.vllm.kv.step_lock import StepLock

    return StepLock()


def lease(pool: Any, lock: Any) -> Any:
    from cleave_worker.vllm.kv.cached_blocks import CachedBlocks

    return CachedBlocks(pool, lock)


def cache(pool: Any, count: int) -> list[Any]:
    """Blocks of a request that has ended, in the cache under the first of KEYS."""
    blocks = pool.get_new_blocks(count)
    request = SimpleNamespace(block_hashes=KEYS)
    pool.cache_full_blocks(request, blocks, 0, count, BLOCK_SIZE, 0)
    pool.free_blocks(reversed(blocks))
    return [block.block_id for block in blocks]


def test_leading_blocks_are_kept_until_they_are_released(pool: Any, lock: Any) -> None:
    cached, blocks = cache(pool, 3), lease(pool, lock)
    assert blocks.acquire(KEYS[:2]) == tuple(cached[:2])
    assert blocks.acquire([KEYS[0], KEYS[5], KEYS[1]]) == (cached[0],)
    # What is leased is not evicted even when the engine needs all blocks.
    free = pool.get_num_free_blocks()
    assert free == NUM_BLOCKS - 1 - 2
    taken = pool.get_new_blocks(free)
    assert not {block.block_id for block in taken} & set(cached[:2])
    pool.free_blocks(taken)
    blocks.release(tuple(cached[:2]))
    blocks.release((cached[0],))
    assert pool.get_num_free_blocks() == NUM_BLOCKS - 1
    assert blocks.acquire(KEYS[:2]) == tuple(cached[:2]), "they are still cached"


def test_only_a_part_of_the_memory_is_leased(pool: Any, lock: Any) -> None:
    cached, blocks = cache(pool, 8), lease(pool, lock)
    assert blocks.acquire(KEYS[:3]) == tuple(cached[:3])
    assert blocks.acquire(KEYS[:3]) == (cached[0],)
    assert blocks.acquire(KEYS) == ()
    blocks.release(tuple(cached[:3]))
    assert blocks.acquire(KEYS) == tuple(cached[:3])


def test_what_a_step_still_computes_is_not_given_out(
    pool: Any, lock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cleave_worker.vllm.kv import cached_blocks

    cached, blocks = cache(pool, 2), lease(pool, lock)
    lock.record_scheduled()
    given: list[tuple[int, ...]] = []
    reader = threading.Thread(target=lambda: given.append(blocks.acquire(KEYS[:2])))
    reader.start()
    reader.join(0.2)
    assert not given
    lock.record_processed()
    reader.join(30)
    assert given == [tuple(cached)]
    blocks.release(given[0])

    monkeypatch.setattr(cached_blocks, "_STEP_TIMEOUT_S", 0.05)
    lock.record_scheduled()
    with pytest.raises(TimeoutError):
        blocks.acquire(KEYS[:2])
    assert pool.get_num_free_blocks() == NUM_BLOCKS - 1


def test_leases_leave_free_blocks_for_the_engine(
    pool: Any, lock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cleave_worker.vllm.kv import cached_blocks

    monkeypatch.setattr(cached_blocks, "_RESERVED_SHARE", 0.2)
    cached, blocks = cache(pool, 3), lease(pool, lock)
    running = pool.get_new_blocks(pool.get_num_free_blocks() - 5)
    assert blocks.acquire(KEYS[:3]) == tuple(cached[:2])
    pool.free_blocks(running)


def test_engines_share_keys_of_sha_256_or_with_a_common_seed(
    monkeypatch: pytest.MonkeyPatch, pool: Any
) -> None:
    from cleave_worker.vllm.kv.cached_blocks import has_common_keys

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert [has_common_keys(each) for each in ("sha256", "sha256_cbor", "xxhash")] == [
        True,
        True,
        False,
    ]
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert has_common_keys("xxhash")


def test_only_caches_that_keep_whole_prompts_are_leased() -> None:
    torch = pytest.importorskip("torch")
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    from cleave_worker.vllm.kv.cached_blocks import can_lease_blocks

    shape = {"block_size": BLOCK_SIZE, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}
    full = FullAttentionSpec(**shape)
    window = SlidingWindowSpec(**shape, sliding_window=8)
    for spec, is_enabled, hash_block_size, expected in (
        (full, True, BLOCK_SIZE, True),
        (full, False, BLOCK_SIZE, False),
        (full, True, BLOCK_SIZE // 2, False),
        (window, True, BLOCK_SIZE, False),
    ):
        pool = SimpleNamespace(hash_block_size=hash_block_size)
        manager = SimpleNamespace(enable_caching=is_enabled, block_pool=pool)
        config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
        assert can_lease_blocks(manager, config) is expected
