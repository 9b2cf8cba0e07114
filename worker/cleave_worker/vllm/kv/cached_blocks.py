"""The prefix cache of a vLLM engine, as `PrefixServer` leases its blocks to other engines.

A lease is a reference to each block, like that of a request, so the engine evicts none of them
meanwhile; what they hold counts as used. `PrefixServer` bounds the time, this module the number.
"""

from collections.abc import Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_cache_interface import KVCacheConfig

from cleave_worker.vllm.kv.layout import find_layer_that_frees_blocks
from cleave_worker.vllm.kv.step_lock import StepLock

_MAX_SHARE_LEASED = 0.25
"""Of all blocks; beyond it less is leased than is cached."""
_STEP_TIMEOUT_S = 5.0
"""Longest wait for the steps that still compute blocks; later nothing is leased."""


def can_lease_blocks(manager: KVCacheManager, config: KVCacheConfig) -> bool:
    """Return whether each block of this engine's cache has one key for all tokens up to its end."""
    (group,) = config.kv_cache_groups
    is_enabled: bool = manager.enable_caching
    has_same_size: bool = manager.block_pool.hash_block_size == group.kv_cache_spec.block_size
    is_complete = not find_layer_that_frees_blocks(group.kv_cache_spec)
    return is_enabled and has_same_size and is_complete


class CachedBlocks:
    """The cached blocks of one engine; see `PrefixCache` of `PrefixServer`."""

    def __init__(self, pool: BlockPool, lock: StepLock) -> None:
        self._pool = pool
        self._lock = lock
        self._max_leased = int(pool.num_gpu_blocks * _MAX_SHARE_LEASED)
        self._num_leased = 0

    def acquire(self, keys: Sequence[bytes]) -> tuple[int, ...]:
        """Return the numbers of the cached ones of the leading blocks, once they are computed."""
        with self._lock:
            blocks = []
            for key in keys[: self._max_leased - self._num_leased]:
                found = self._pool.get_cached_block(BlockHash(key), [0])
                if not found:
                    break
                blocks += found
            self._pool.touch(blocks)
            self._num_leased += len(blocks)
        leased = tuple(int(block.block_id) for block in blocks)
        if leased and not self._lock.wait_for_steps(_STEP_TIMEOUT_S):
            self.release(leased)
            return ()
        return leased

    def release(self, blocks: Sequence[int]) -> None:
        """Drop the references. The end of the prefix is evicted first, as vLLM does."""
        with self._lock:
            self._num_leased -= len(blocks)
            self._pool.free_blocks(self._pool.blocks[block] for block in reversed(blocks))
