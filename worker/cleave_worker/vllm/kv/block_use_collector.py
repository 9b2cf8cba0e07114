"""Writes the oldest use of vLLM's KV blocks to the load page, for the agent.

vLLM calls a metrics collector for each block that is allocated, found in the prefix cache or
evicted. It runs in the scheduler's process; the API server's writes the rest of the page.
"""

import os
from pathlib import Path

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from cleave.shm.load_page import ENV, LoadPage
from cleave_worker.scheduling.block_uses import BlockUses


class BlockUseCollector(KVCacheMetricsCollector):
    """Takes the place of vLLM's own collector in the block pool."""

    def __init__(self, page: LoadPage) -> None:
        super().__init__()
        self.uses = BlockUses()
        self._page = page
        self._written_ns = 0

    def on_block_allocated(self, block: KVCacheBlock) -> None:
        """A request will write a block, which may have been evicted for it."""
        self.uses.begin(block.block_id)

    def on_block_accessed(self, block: KVCacheBlock) -> None:
        """A request has found a block in the prefix cache; the null block stands for others."""
        if not block.is_null:
            self.uses.begin(block.block_id)

    def on_block_evicted(self, block: KVCacheBlock) -> None:
        """Nothing: a block is evicted to be allocated, except for one whose content got lost."""

    def reset(self) -> None:
        """The prefix cache was emptied, maybe by an engine that is idle from now on."""
        self.uses.clear()
        self.publish()

    def publish(self) -> None:
        """Write what has changed, once a step."""
        oldest_ns = self.uses.oldest_ns
        if oldest_ns != self._written_ns:
            self._written_ns = oldest_ns
            self._page.write_oldest_kv(oldest_ns)


def observe_uses(manager: KVCacheManager) -> BlockUseCollector | None:
    """Observe the uses of the pool's blocks; None: there is no agent, no prefix cache, or vLLM has
    a collector of its own (`--kv-cache-metrics`)."""
    pool, path = manager.block_pool, os.environ.get(ENV)
    if not path or not manager.enable_caching or pool.metrics_collector is not None:
        return None
    pool.metrics_collector = collector = BlockUseCollector(LoadPage(Path(path)))
    return collector
