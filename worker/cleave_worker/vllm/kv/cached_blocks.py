"""The prefix cache of a vLLM engine, as `PrefixServer` leases its blocks to other engines.

A lease is a reference to each block, like that of a request, so the engine evicts none of them
meanwhile; what they hold counts as used. `PrefixServer` bounds the time, this module the number.
"""

import os
from collections.abc import Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_cache_interface import KVCacheConfig

from cleave_worker.vllm.kv.layout import find_layer_that_frees_blocks
from cleave_worker.vllm.kv.step_lock import StepLock

_MAX_SHARE_LEASED = 0.25
"""Of all blocks; beyond it less is leased than is cached."""
_RESERVED_SHARE = 0.05
"""Of all blocks, which leases leave free for the engine's own requests."""
_STEP_TIMEOUT_S = 5.0
"""Longest wait for the steps that still compute blocks; later nothing is leased."""


def can_lease_blocks(manager: KVCacheManager, config: KVCacheConfig) -> bool:
    """Return whether each block of this engine's cache has one key for all tokens up to its end."""
    (group,) = config.kv_cache_groups
    is_enabled: bool = manager.enable_caching
    has_same_size: bool = manager.block_pool.hash_block_size == group.kv_cache_spec.block_size
    is_complete = not find_layer_that_frees_blocks(group.kv_cache_spec)
    return is_enabled and has_same_size and is_complete


def has_common_keys(hash_algorithm: str) -> bool:
    """Return whether engines compute the same keys: with other algorithms than SHA-256 vLLM (0.32)
    begins with a number of the process, unless it gets one."""
    return hash_algorithm.startswith("sha256") or "PYTHONHASHSEED" in os.environ


class CachedBlocks:
    """The cached blocks of one engine; see `PrefixCache` of `PrefixServer`."""

    def __init__(self, pool: BlockPool, lock: StepLock) -> None:
        self._pool = pool
        self._lock = lock
        self._max_leased = int(pool.num_gpu_blocks * _MAX_SHARE_LEASED)
        self._reserved = int(pool.num_gpu_blocks * _RESERVED_SHARE)
        self._num_leased = 0

    def acquire(self, keys: Sequence[bytes]) -> tuple[int, ...]:
        """Return the numbers of the cached ones of the leading blocks, once they are computed.
        Raises TimeoutError when the steps that compute them last too long."""
        with self._lock:
            blocks = []
            num_free = self._pool.get_num_free_blocks() - self._reserved
            for key in keys[: self._max_leased - self._num_leased]:
                found = self._pool.get_cached_block(BlockHash(key), [0])
                num_free -= sum(block.ref_cnt == 0 for block in found or ())
                if not found or num_free < 0:
                    break
                blocks += found
            self._pool.touch(blocks)
            self._num_leased += len(blocks)
        leased = tuple(int(block.block_id) for block in blocks)
        if leased and not self._lock.wait_for_steps(_STEP_TIMEOUT_S):
            self.release(leased)
            raise TimeoutError("the steps that compute the blocks last too long")
        return leased

    def release(self, blocks: Sequence[int]) -> None:
        """Drop the references. The end of the prefix is evicted first, as vLLM does."""
        with self._lock:
            self._num_leased -= len(blocks)
            self._pool.free_blocks(self._pool.blocks[block] for block in reversed(blocks))
