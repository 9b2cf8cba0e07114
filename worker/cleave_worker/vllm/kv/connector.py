"""Cleave's KV connector as vLLM loads it: `kv_connector` CleaveConnector of this module.

An alternative to vLLM's NixlConnector that never uses KV of another prompt, another boot or reused
memory: such handoffs are refused and counted, and the prompt is recomputed or fails, depending on
`kv_load_failure_policy`. See `SchedulerSide` and `WorkerSide`.
"""

import logging
import os
import secrets
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.forward_context import ForwardContext
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from cleave.rpc.engine_key import ENV as ENGINE_KEY_ENV
from cleave.rpc.engine_key import compute_kv_key
from cleave_worker.transfer.memory import register_tensors
from cleave_worker.transfer.prefix_server import PrefixOffer, PrefixServer
from cleave_worker.transfer.server import RegisteredKv
from cleave_worker.transfer.sharding import ShardSpec
from cleave_worker.transfer.transport import Transport
from cleave_worker.transfer.transports.nixl import choose_transports, filter_installed
from cleave_worker.vllm.kv.block_use_collector import BlockUseCollector, observe_uses
from cleave_worker.vllm.kv.cached_blocks import (
    CachedBlocks,
    can_lease_blocks,
    has_common_keys,
)
from cleave_worker.vllm.kv.layout import build_layout, build_shape, check_layout
from cleave_worker.vllm.kv.metadata import CleaveConnectorMetadata, RankAddress
from cleave_worker.vllm.kv.metrics import KvTransferMetrics, KvTransferStats
from cleave_worker.vllm.kv.prefix_pulls import PrefixPulls
from cleave_worker.vllm.kv.scheduler_side import FinishResult, SchedulerSide
from cleave_worker.vllm.kv.step_lock import STEP_LOCK, lock_scheduler
from cleave_worker.vllm.kv.worker_side import (
    READ_GRACE_S,
    ConnectorSettings,
    TransferGranularity,
    WorkerSide,
)

_log = logging.getLogger(__name__)
_TRANSFER_TIMEOUT_S = 30.0


class CleaveConnector(base.KVConnectorBase_V1, base.SupportsHMA):
    """The scheduler side or a worker side of the connector, depending on `role`."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(
        self, vllm_config: VllmConfig, role: base.KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Raises ValueError for models with several KV cache groups, which need Nixl."""
        super().__init__(vllm_config, role, kv_cache_config)
        _log_as_vllm()
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ValueError(
                f"the model has {len(kv_cache_config.kv_cache_groups)} KV cache groups and "
                "CleaveConnector supports one: set spec.engine.connector Nixl, or add "
                "--disable-hybrid-kv-cache-manager to spec.engine.args, which takes more KV memory"
            )
        self._worker: WorkerSide | None = None
        self._layer_positions: dict[str, int] = {}
        self._scheduler: SchedulerSide | None = None
        self._prefix_pulls: PrefixPulls | None = None
        """None: this engine computes what it has not cached."""
        self._prefix_server: PrefixServer | None = None
        self._block_uses: BlockUseCollector | None = None
        if role is base.KVConnectorRole.SCHEDULER:
            block_size = vllm_config.cache_config.block_size
            self._scheduler = SchedulerSide(
                self._boot_id, block_size, build_shape(vllm_config), _read_kv_key()
            )

    # Class methods that vLLM calls

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return a layout with one tensor per layer and contiguous blocks."""
        return None if vllm_config.model_config.use_mla else "LBHNC"

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvTransferStats:
        """Rebuild statistics that another process sent."""
        return KvTransferStats(data)

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> KvTransferMetrics:  # noqa: ANN401
        """Return the Prometheus metrics."""
        return KvTransferMetrics(*args)

    # Scheduler side

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Prepare to pull prefixes from the caches of other engines, to offer the own one, and to
        report its oldest use."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._block_uses = observe_uses(kv_cache_manager)
        # With another policy a prefix that is lost would be an error for the client.
        settings = self._kv_transfer_config
        # vLLM keeps blocks until the steps that write them are over, for consumers only.
        can_pull = settings.kv_load_failure_policy == "recompute" and settings.is_kv_consumer
        can_share = has_common_keys(self._vllm_config.cache_config.prefix_caching_hash_algo)
        can_lease = can_share and can_lease_blocks(kv_cache_manager, self._kv_cache_config)
        if can_pull and can_lease:
            lock_scheduler()
            block_size = self._vllm_config.cache_config.block_size
            self._prefix_pulls = PrefixPulls(self._boot_id, block_size)

    def on_new_request(self, request: Request) -> None:
        """Read the handoff of a request that has arrived, and where its prefix may be."""
        self._require_scheduler().on_new_request(request)
        if self._prefix_pulls:
            self._prefix_pulls.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the tokens to pull, and whether that happens between steps; None: not known yet,
        for a prefix that may be in another engine's cache."""
        count: int | None
        count = self._require_scheduler().count_tokens_to_pull(request, num_computed_tokens)
        if not count and self._prefix_pulls:
            count = self._prefix_pulls.count_tokens(request, num_computed_tokens)
        return count, bool(count)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Pull into the blocks allocated to a request."""
        self._require_scheduler().update_after_alloc(request, blocks.blocks[0], num_external_tokens)
        if self._prefix_pulls:
            self._prefix_pulls.update_after_alloc(request, blocks.blocks[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> CleaveConnectorMetadata:
        """Return the workers' tasks of this step."""
        metadata = self._require_scheduler().build_metadata(scheduler_output)
        if self._prefix_pulls:
            metadata.prefix_reads = self._prefix_pulls.take_reads()
        if self._block_uses:
            self._block_uses.publish()
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """End the leases of prefixes that all ranks have read."""
        if self._prefix_pulls:
            for request_id in connector_output.finished_recving or ():
                self._prefix_pulls.end(request_id)

    def request_finished(self, request: Request, block_ids: list[int]) -> FinishResult:
        """End a request; return whether its blocks stay leased, and the handoff."""
        if self._prefix_pulls:
            self._prefix_pulls.end(request.request_id)
        return self._require_scheduler().finish_request(request, block_ids)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> FinishResult:
        """End a request of a model that could have several KV cache groups, and has one."""
        return self.request_finished(request, block_ids[0])

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], RankAddress]
    ) -> None:
        """Set the address of each rank, by (pipeline rank, tensor rank), and offer the prefix
        cache, unless its port is taken."""
        addresses = tuple((address.host, address.port) for _, address in sorted(metadata.items()))
        secret = secrets.token_hex()
        self._require_scheduler().set_rank_addresses(addresses, secret)
        extra = self._kv_transfer_config.get_from_extra_config
        port = int(extra("prefix_port", 0))
        if not port or not self._prefix_pulls:
            return
        assert self._kv_cache_manager
        cache = CachedBlocks(self._kv_cache_manager.block_pool, STEP_LOCK)
        shape = build_shape(self._vllm_config)
        offer = PrefixOffer(self._boot_id, shape, addresses, secret, _read_kv_key())
        lease_s = float(extra("transfer_timeout", _TRANSFER_TIMEOUT_S)) + READ_GRACE_S
        try:
            self._prefix_server = PrefixServer(self._host, port, offer, cache, lease_s)
        except OSError as error:
            _log.warning("the prefix cache is not offered: port %d: %s", port, error)

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Move the allocated KV cache into shared memory where possible, and start to serve it."""
        # Engines with other pipeline stages identify layers by number.
        layers = sorted((extract_layer_index(name), name) for name in kv_caches)
        caches = [kv_caches[name] for _, name in layers]
        self._layer_positions = {name: position for position, (_, name) in enumerate(layers)}
        memory, layer_regions = register_tensors(caches, self._kv_cache_config.num_blocks)
        shape = build_shape(self._vllm_config)
        layout = build_layout(self._vllm_config, caches[0])
        shard = ShardSpec(shape, compute_rank(), tuple(number for number, _ in layers))
        check_layout(shard, layout, caches, self._kv_cache_config.num_blocks)
        kv = RegisteredKv(
            self._boot_id, layout, memory, tuple(layer_regions), self._host, shard, _read_kv_key()
        )
        self._worker = WorkerSide(kv, self._read_settings(memory.device))

    def get_handshake_metadata(self) -> RankAddress | None:
        """Return the address at which this rank serves."""
        return RankAddress(self._host, self._require_worker().port)

    def bind_connector_metadata(self, connector_metadata: base.KVConnectorMetadata) -> None:
        """Store the metadata of the step that begins."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker and isinstance(connector_metadata, CleaveConnectorMetadata):
            self._worker.apply_metadata(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: object) -> None:  # noqa: ARG002
        """Start to pull."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, CleaveConnectorMetadata)
        self._require_worker().start_pulls(metadata.pulls, metadata.declined_pulls)
        self._require_worker().start_prefix_reads(metadata.prefix_reads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: requests wait for their KV between steps."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,  # noqa: ARG002
        attn_metadata: AttentionMetadata,  # noqa: ARG002
        **kwargs: object,  # noqa: ARG002
    ) -> None:
        """Announce the layer; consumers read it in place."""
        position = self._layer_positions.get(layer_name, -1)
        self._require_worker().layer_notifier.finish_layer(position)

    def wait_for_save(self) -> None:
        """Announce the end of the step; nothing is saved elsewhere."""
        self._require_worker().layer_notifier.finish_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> base.KVConnectorTransferResults:  # noqa: ARG002
        """Return the requests whose leases or pulls have ended."""
        worker = self._require_worker()
        received, failed = worker.take_received()
        return base.KVConnectorTransferResults(worker.take_sent(), received, failed)

    def get_kv_connector_stats(self) -> KvTransferStats | None:
        """Return statistics since the last step."""
        side = self._worker or self._scheduler
        transfers = side.take_stats() if side else None
        if transfers and self._prefix_pulls:
            transfers.aggregate(self._prefix_pulls.take_stats())
        return transfers if transfers and not transfers.is_empty() else None

    def shutdown(self) -> None:
        """Stop serving and pulling."""
        for each in (self._worker, self._prefix_pulls, self._prefix_server):
            if each:
                each.close()

    # Settings

    @property
    def _boot_id(self) -> str:
        return str(self._kv_transfer_config.engine_id)

    @property
    def _host(self) -> str:
        return str(self._kv_transfer_config.get_from_extra_config("host", "127.0.0.1"))

    def _read_settings(self, device: torch.device) -> ConnectorSettings:
        extra = self._kv_transfer_config.get_from_extra_config
        transports = tuple(
            Transport(name) for name in extra("transports", choose_transports(device))
        )
        granularity = TransferGranularity(extra("granularity", TransferGranularity.LAYER))
        is_by_layer = granularity is TransferGranularity.LAYER
        # With microbatches vLLM reports a layer as done when only a part of the tokens is.
        if is_by_layer and self._vllm_config.parallel_config.use_ubatching:
            granularity = TransferGranularity.CHUNK
        return ConnectorSettings(
            port=int(extra("port", 0)),
            transports=filter_installed(transports),
            lease_s=float(extra("kv_lease_duration", 30)),
            transfer_s=float(extra("transfer_timeout", _TRANSFER_TIMEOUT_S)),
            check_bytes=bool(extra("checksums", False)),
            granularity=granularity,
            layerwise_timeout_s=float(extra("layerwise_timeout", 120)),
        )

    def _require_scheduler(self) -> SchedulerSide:
        assert self._scheduler, "called on a worker, not on the scheduler"
        return self._scheduler

    def _require_worker(self) -> WorkerSide:
        assert self._worker, "the KV cache is not registered yet"
        return self._worker


# MultiConnector of vLLM 0.32 finds the class of a connector's statistics by name only.
_NAME = CleaveConnector.__name__
KVConnectorFactory.register_connector(_NAME, __name__, _NAME)


def _read_kv_key() -> str:
    return compute_kv_key(os.environ.get(ENGINE_KEY_ENV, ""))


def compute_rank() -> int:
    """Return the rank of this worker in its engine."""
    stage, tensor_parallel = get_pp_group().rank_in_group, get_tp_group()
    return int(stage * tensor_parallel.world_size + tensor_parallel.rank_in_group)


def _log_as_vllm() -> None:
    """Log through vLLM's handlers."""
    own, engines = logging.getLogger("cleave_worker"), logging.getLogger("vllm")
    own.handlers = engines.handlers
    own.setLevel(engines.level)
    own.propagate = engines.propagate
