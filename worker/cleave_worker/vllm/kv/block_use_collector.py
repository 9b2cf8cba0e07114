"""Observes evictions of vLLM's block pool and writes them to the load page for the agent.

vLLM tells a collector of metrics when blocks are allocated, used again and evicted (`--kv-cache-
metrics` has one of its own, which is kept; then nothing is observed). Runs in the scheduler's
process, while the rest of the page is written by the API server's.
"""

import os
from pathlib import Path

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from cleave.shm.load_page import ENV, LoadPage
from cleave_worker.scheduling.block_uses import BlockUses


class BlockUseCollector:
    """In the place of vLLM's KVCacheMetricsCollector."""

    def __init__(self, num_blocks: int, page: LoadPage) -> None:
        self._uses = BlockUses(num_blocks)
        self._page = page
        self._written_ns = 0

    def on_block_allocated(self, block: KVCacheBlock) -> None:
        """A request gets a block."""
        self._uses.begin(block.block_id)

    def on_block_accessed(self, block: KVCacheBlock) -> None:
        """A request has found a block in the prefix cache."""
        if not block.is_null:
            self._uses.begin(block.block_id)

    def on_block_evicted(self, block: KVCacheBlock) -> None:
        """A block is taken for other content. Those without a hash are in no cache, and one in use
        is evicted because its content was not written, not because it is the oldest."""
        if block.block_hash is not None and not block.ref_cnt:
            self._uses.evict(block.block_id)

    def reset(self) -> None:
        """The prefix cache is empty: what will be evicted was used from now on."""
        self._uses.evicted_ns = 0
        self.publish()

    def publish(self) -> None:
        """Write what has changed, once a step."""
        if self._uses.evicted_ns != self._written_ns:
            self._written_ns = self._uses.evicted_ns
            self._page.write_oldest_kv(self._written_ns)


def observe_uses(manager: KVCacheManager) -> BlockUseCollector | None:
    """Observe the uses of the pool's blocks; None: there is no agent, no prefix cache, or already
    another collector."""
    pool, path = manager.block_pool, os.environ.get(ENV)
    if not path or not manager.enable_caching or pool.metrics_collector is not None:
        return None
    collector = BlockUseCollector(pool.num_gpu_blocks, LoadPage(Path(path)))
    pool.metrics_collector = collector
    return collector
