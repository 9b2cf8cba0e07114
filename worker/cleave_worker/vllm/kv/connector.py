"""Cleave's KV connector, as vLLM loads it: `kv_connector` CleaveConnector of this module.

Beside vLLM's own NixlConnector and in its place where a hand-off must never be of another prompt,
another boot or memory that somebody else uses now: those are refused, counted and computed anew
(`kv_load_failure_policy` recompute) or fail clearly. The halves are in scheduler.py and worker.py.
"""

import logging
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from cleave_worker.transfer.link import Way
from cleave_worker.transfer.memory import register
from cleave_worker.transfer.nixl import usable, usual
from cleave_worker.transfer.owner import Kept
from cleave_worker.transfer.shapes import Share
from cleave_worker.vllm.kv.announcing import Pace
from cleave_worker.vllm.kv.layout import check, layout_of, shape_of
from cleave_worker.vllm.kv.metrics import TransferMetrics, Transfers
from cleave_worker.vllm.kv.orders import Orders, Place
from cleave_worker.vllm.kv.scheduler import SchedulerSide
from cleave_worker.vllm.kv.worker import Settings, WorkerSide


class CleaveConnector(KVConnectorBase_V1, SupportsHMA):
    """One half: the scheduler's or a worker's, as `role` says."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: Any,  # noqa: ANN401
    ) -> None:
        """Raises ValueError for models whose KV is of several kinds: they need NixlConnector."""
        super().__init__(vllm_config, role, kv_cache_config)
        _log_as_vllm()
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ValueError(
                f"the model keeps KV of {len(kv_cache_config.kv_cache_groups)} kinds and "
                "CleaveConnector moves one: use NixlConnector"
            )
        self._worker: WorkerSide | None = None
        self._plane_of: dict[str, int] = {}
        self._scheduler = self._scheduler_side() if role is KVConnectorRole.SCHEDULER else None

    # vLLM's questions about the class

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Layer by layer, blocks in one piece."""
        return None if vllm_config.model_config.use_mla else "LBHNC"

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Transfers:
        """Statistics as they come from another process."""
        return Transfers(data)

    @classmethod
    def build_prom_metrics(cls, *told: Any) -> TransferMetrics:  # noqa: ANN401
        """Prometheus series."""
        return TransferMetrics(*told)

    # The scheduler's half

    def on_new_request(self, request: Any) -> None:  # noqa: ANN401
        """A request has arrived."""
        self._told_scheduler().on_new_request(request)

    def get_num_new_matched_tokens(
        self,
        request: Any,  # noqa: ANN401
        num_computed_tokens: int,
    ) -> tuple[int, bool]:
        """Tokens to pull, between steps."""
        count = self._told_scheduler().tokens_to_pull(request, num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(
        self,
        request: Any,  # noqa: ANN401
        blocks: Any,  # noqa: ANN401
        num_external_tokens: int,
    ) -> None:
        """A request has blocks."""
        self._told_scheduler().allocated(request, blocks.blocks[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Orders:  # noqa: ANN401
        """What workers are to do with this step."""
        return self._told_scheduler().take_orders(scheduler_output)

    def request_finished(
        self,
        request: Any,  # noqa: ANN401
        block_ids: list[int],
    ) -> tuple[bool, dict[str, object] | None]:
        """A request has ended: whether its blocks are kept, and the hand-off."""
        return self._told_scheduler().finished(request, block_ids)

    def request_finished_all_groups(
        self,
        request: Any,  # noqa: ANN401
        block_ids: tuple[list[int], ...],
    ) -> tuple[bool, dict[str, object] | None]:
        """The same where vLLM could keep KV of several kinds."""
        return self._told_scheduler().finished(request, block_ids[0])

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Place]) -> None:
        """Where the ranks serve, by (pipeline, tensor) rank."""
        self._told_scheduler().locate(
            tuple((place.host, place.port) for _, place in sorted(metadata.items()))
        )

    # The workers' half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The KV is allocated: move it into shared memory if that serves, and start to serve."""
        # Ranks of another shape find layers by their numbers.
        layers = sorted((extract_layer_index(name), name) for name in kv_caches)
        caches = [kv_caches[name] for _, name in layers]
        self._plane_of = {name: plane for plane, (_, name) in enumerate(layers)}
        memory, planes = register(caches, self._kv_cache_config.num_blocks)
        shape = shape_of(self._vllm_config)
        rank = get_pp_group().rank_in_group * shape.tensor_parallel_size
        rank += get_tp_group().rank_in_group
        layout = layout_of(self._vllm_config, caches[0])
        share = Share(shape, rank, tuple(number for number, _ in layers))
        check(share, layout, caches, self._kv_cache_config.num_blocks)
        kept = Kept(self._boot_id, layout, memory, tuple(planes), self._host, share)
        self._worker = WorkerSide(kept, self._settings(memory.regions[0].device))

    def get_handshake_metadata(self) -> Place | None:
        """Where this rank serves."""
        return Place(self._host, self._told_worker().port)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker and isinstance(connector_metadata, Orders):
            self._worker.note(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ANN401, ARG002
        """Begin to pull."""
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        self._told_worker().start(orders.pull, orders.decline)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Requests wait for their KV outside of steps."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,  # noqa: ARG002
        attn_metadata: Any,  # noqa: ANN401, ARG002
        **kwargs: Any,  # noqa: ANN401, ARG002
    ) -> None:
        """Readers take it from where it is; those that wait for it are told."""
        self._told_worker().layer_done(self._plane_of.get(layer_name, -1))

    def wait_for_save(self) -> None:
        """Nothing is saved elsewhere; readers hear that the step is over."""
        self._told_worker().step_done()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """What has ended since the last step."""
        worker = self._told_worker()
        received, failed = worker.take_received()
        return KVConnectorTransferResults(worker.take_sent(), received, failed)

    def get_kv_connector_stats(self) -> Transfers | None:
        """What has happened since the last step."""
        side = self._worker or self._scheduler
        transfers = side.take_transfers() if side else None
        return transfers if transfers and not transfers.is_empty() else None

    def shutdown(self) -> None:
        """Stop serving and pulling."""
        if self._worker:
            self._worker.close()

    # What the configuration says

    @property
    def _boot_id(self) -> str:
        return str(self._kv_transfer_config.engine_id)

    @property
    def _host(self) -> str:
        return str(self._kv_transfer_config.get_from_extra_config("host", "127.0.0.1"))

    def _scheduler_side(self) -> SchedulerSide:
        return SchedulerSide(
            self._boot_id,
            self._vllm_config.cache_config.block_size,
            shape_of(self._vllm_config),
        )

    def _settings(self, device: torch.device) -> Settings:
        extra = self._kv_transfer_config.get_from_extra_config
        return Settings(
            port=int(extra("port", 0)),
            ways=usable(tuple(Way(way) for way in extra("ways", usual(device)))),
            lease_s=float(extra("kv_lease_duration", 30)),
            transfer_s=float(extra("transfer_timeout", 30)),
            check_bytes=bool(extra("checksums", False)),
            pace=self._pace,
            patience_s=float(extra("follow_timeout", 120)),
        )

    @property
    def _pace(self) -> Pace:
        pace = Pace(self._kv_transfer_config.get_from_extra_config("pace", Pace.LAYER))
        # With microbatches a layer is said to be done when it is for some of the step's tokens.
        halved = self._vllm_config.parallel_config.use_ubatching
        return Pace.CHUNK if halved and pace is Pace.LAYER else pace

    def _told_scheduler(self) -> SchedulerSide:
        assert self._scheduler, "a worker was asked what its scheduler knows"
        return self._scheduler

    def _told_worker(self) -> WorkerSide:
        assert self._worker, "the KV is not registered yet"
        return self._worker


def _log_as_vllm() -> None:
    """Have our lines appear among the engine's."""
    own, engines = logging.getLogger("cleave_worker"), logging.getLogger("vllm")
    own.handlers = engines.handlers
    own.setLevel(engines.level)
    own.propagate = engines.propagate
