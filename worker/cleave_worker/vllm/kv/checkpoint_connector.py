"""CleaveConnector with checkpoints: KV of running requests survives their engine.

Loaded instead of CleaveConnector where `kv_connector_extra_config` has `checkpoints`. An engine
copies each full block that it decodes into a folder in host memory. An engine of the same host that
resumes a request, given prompt and output so far, restores the blocks. See `CheckpointScheduler`
for the scheduler side and `CheckpointWorker` for the worker side.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.forward_context import ForwardContext
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from cleave_worker.transfer.checkpoints import CheckpointStore
from cleave_worker.transfer.memory import register_tensors
from cleave_worker.vllm.kv.checkpoint_scheduler import CheckpointMetadata, CheckpointScheduler
from cleave_worker.vllm.kv.checkpoint_worker import CheckpointWorker
from cleave_worker.vllm.kv.connector import CleaveConnector, compute_rank
from cleave_worker.vllm.kv.layout import (
    build_layout,
    find_layer_that_frees_blocks,
    read_weights_id,
)
from cleave_worker.vllm.kv.metadata import CleaveConnectorMetadata
from cleave_worker.vllm.kv.metrics import KvTransferStats
from cleave_worker.vllm.kv.scheduler_side import FinishResult

_DEFAULT_FOLDER = "/dev/shm/cleave-checkpoints"  # noqa: S108 - it is memory on purpose
_DEFAULT_MAX_GIB = 4.0


@dataclass
class CheckpointedConnectorMetadata(CleaveConnectorMetadata):
    """Metadata of handoffs and checkpoints."""

    checkpoints: CheckpointMetadata = field(default_factory=CheckpointMetadata)


class CheckpointedConnector(CleaveConnector):
    """The scheduler side or a worker side of the connector, depending on `role`."""

    def __init__(
        self, vllm_config: VllmConfig, role: base.KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Raises ValueError for invalid settings."""
        super().__init__(vllm_config, role, kv_cache_config)
        check_attention(kv_cache_config.kv_cache_groups[0].kv_cache_spec)
        self._folder, self._max_bytes = read_settings(
            self._kv_transfer_config.get_from_extra_config("checkpoints", {})
        )
        self._checkpoint_worker: CheckpointWorker | None = None
        self._checkpoint_scheduler: CheckpointScheduler | None = None
        if role is base.KVConnectorRole.SCHEDULER:
            block_size = vllm_config.cache_config.block_size
            # The scheduler only checks whether a block exists; rank 0 represents all ranks.
            exists = CheckpointStore(self._folder, 0, bytes(32), 0).contains
            model, parallel = vllm_config.model_config, vllm_config.parallel_config
            identity = (
                f"{model.model}@{model.revision or ''}|{read_weights_id()}|{model.dtype}"
                f"|{vllm_config.cache_config.cache_dtype}"
                f"|{parallel.tensor_parallel_size}|{parallel.pipeline_parallel_size}"
            )
            self._checkpoint_scheduler = CheckpointScheduler(identity, block_size, exists)

    # Scheduler side

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the tokens to pull, else to restore, and whether that happens between steps."""
        to_pull = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if to_pull[0] != 0:
            return to_pull
        checkpoints = self._require_checkpoint_scheduler()
        count = checkpoints.count_restorable_tokens(request, num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Pull or restore into the blocks allocated to a request."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._require_checkpoint_scheduler().update_after_alloc(
            request, blocks.blocks[0], num_external_tokens
        )

    def build_connector_meta(
        self, scheduler_output: SchedulerOutput
    ) -> CheckpointedConnectorMetadata:
        """Return the workers' tasks of this step."""
        metadata = super().build_connector_meta(scheduler_output)
        checkpoints = self._require_checkpoint_scheduler().build_metadata(self._get_block_ids)
        return CheckpointedConnectorMetadata(**vars(metadata), checkpoints=checkpoints)

    def request_finished(self, request: Request, block_ids: list[int]) -> FinishResult:
        """End a request; return whether its blocks stay leased, and the handoff."""
        self._require_checkpoint_scheduler().finish_request(request)
        return super().request_finished(request, block_ids)

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Open the checkpoint folder for the allocated KV cache."""
        super().register_kv_caches(kv_caches)
        # The base class has moved the caches into shared memory.
        memory, layers = register_tensors(kv_caches.values(), self._kv_cache_config.num_blocks)
        rank, first = compute_rank(), next(iter(kv_caches.values()))
        sizes = [layer.block_bytes for layer in layers]
        identity = [build_layout(self._vllm_config, first), list(kv_caches), sizes, rank]
        digest = hashlib.blake2b(msgspec.json.encode(identity), digest_size=32).digest()
        checkpoints = CheckpointStore(self._folder, rank, digest, self._max_bytes)
        self._checkpoint_worker = CheckpointWorker(memory, layers, checkpoints)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: object) -> None:
        """Start to pull and restore, and copy full blocks."""
        super().start_load_kv(forward_context, **kwargs)
        metadata: base.KVConnectorMetadata = self._get_connector_metadata()
        assert isinstance(metadata, CheckpointedConnectorMetadata)
        self._require_checkpoint_worker().start_step(metadata.checkpoints)

    def get_transfer_results(self, finished_req_ids: set[str]) -> base.KVConnectorTransferResults:
        """Return the requests whose transfers or restores have ended."""
        results = super().get_transfer_results(finished_req_ids)
        ended, failed = self._require_checkpoint_worker().take_restored()
        results.finished_recving.update(ended)
        results.failed_recving.update(failed)
        return results

    def get_kv_connector_stats(self) -> KvTransferStats | None:
        """Return statistics since the last step."""
        transfers = super().get_kv_connector_stats()
        own = self._checkpoint_worker.take_stats() if self._checkpoint_worker else None
        if own is None or own.is_empty():
            return transfers
        return own.aggregate(transfers) if transfers else own

    def shutdown(self) -> None:
        """Stop; checkpoints of running requests stay."""
        super().shutdown()
        if self._checkpoint_worker:
            self._checkpoint_worker.close()

    def _get_block_ids(self, request_id: str) -> list[int]:
        ids: tuple[list[int], ...] = self._kv_cache_manager.get_block_ids(request_id)
        return ids[0]

    def _require_checkpoint_scheduler(self) -> CheckpointScheduler:
        assert self._checkpoint_scheduler, "called on a worker, not on the scheduler"
        return self._checkpoint_scheduler

    def _require_checkpoint_worker(self) -> CheckpointWorker:
        assert self._checkpoint_worker, "the KV cache is not registered yet"
        return self._checkpoint_worker


# As for CleaveConnector.
_NAME = CheckpointedConnector.__name__
KVConnectorFactory.register_connector(_NAME, __name__, _NAME)


def check_attention(spec: object) -> None:
    """Raises ValueError for models that free blocks of a running request."""
    if name := find_layer_that_frees_blocks(spec):
        raise ValueError(
            f"checkpoints: the model has KV cache layers of type {name}, which frees blocks of "
            "running requests: leave checkpoints out"
        )


def read_settings(value: object) -> tuple[Path, int]:
    """Return (folder, maximum bytes) from the setting `checkpoints`. Raises ValueError."""
    settings = value if isinstance(value, Mapping) else {}
    if value != settings or settings.keys() - {"folder", "most_gib"}:
        raise ValueError(
            f"checkpoints {value!r}: must be an object with folder and most_gib, or empty"
        )
    folder = settings.get("folder", _DEFAULT_FOLDER)
    max_gib = settings.get("most_gib", _DEFAULT_MAX_GIB)
    if not isinstance(folder, str) or not Path(folder).is_absolute():
        raise ValueError(f"checkpoints.folder {folder!r}: must be an absolute path")
    if not isinstance(max_gib, int | float) or not max_gib > 0:
        raise ValueError(f"checkpoints.most_gib {max_gib!r}: must be a number above 0")
    return Path(folder), int(max_gib * 2**30)
