"""vLLM's OffloadingConnector beside a connector that fills blocks between steps.

Named by agents in vLLM's `kv_connector_module_path` (`agent.launch`); the class has vLLM's name, by
which MultiConnector finds its statistics. What is hard: vLLM 0.32 frees the blocks of a finished
request while they are still copied to host memory, and waits for these copies only before a step
writes to the blocks. A handoff or a prefix of another engine is written between steps, so host
memory would get it under the keys of the finished request.
"""

from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.request import Request


class OffloadingConnector(offloading_connector.OffloadingConnector):
    """Waits for copies of all blocks that are allocated, also for another connector."""

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Note the blocks allocated to a request, whose copies end before the next step begins."""
        allocated = self.scheduler._current_batch_allocated_block_ids
        allocated.update(
            block.block_id
            for group in blocks.blocks
            for block in group
            if block.block_hash is None and not block.is_null
        )
        super().update_state_after_alloc(request, blocks, num_external_tokens)
