"""vLLM's interfaces that the KV connector uses are unchanged: fails when one moves."""

import dataclasses
import inspect
from typing import Any

import pytest

pytestmark = [
    pytest.mark.vllm,
    # vLLM and what it imports warn of their own future.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def base() -> Any:
    return pytest.importorskip(
        "vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs the group worker-cpu"
    )


@pytest.fixture(scope="module")
def connector(base: Any) -> Any:
    from cleave_worker.vllm.kv.connector import CleaveConnector

    return CleaveConnector


def names(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_every_method_that_vllm_calls_is_called_as_before(base: Any, connector: Any) -> None:
    own = {
        name: method
        for name, method in inspect.getmembers(connector, callable)
        if not name.startswith("_") and method is not getattr(base.KVConnectorBase_V1, name, None)
    }
    entry_points = {
        name: method
        for parent in (base.KVConnectorBase_V1, base.SupportsHMA)
        for name, method in inspect.getmembers(parent, callable)
    }
    for name, method in own.items():
        assert name in entry_points, f"vLLM does not call {name} any more"
        if name != "build_prom_metrics":
            assert names(method) == names(entry_points[name]), f"{name} takes other arguments"
    missing = {
        name
        for name, method in inspect.getmembers(connector)
        if getattr(method, "__isabstractmethod__", False)
    }
    assert not missing


def test_multi_connector_finds_the_class_of_statistics_by_name(connector: Any) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    from cleave_worker.vllm.kv.metrics import KvTransferStats

    stats = KvTransferStats()
    found = MultiConnector.build_kv_connector_stats({connector.__name__: stats.to_dict()})
    assert found is not None
    assert isinstance(found[connector.__name__], KvTransferStats)


def test_failed_pulls_are_reported_and_answered_as_before(base: Any) -> None:
    from vllm.config import KVTransferConfig
    from vllm.v1.core.sched.scheduler import Scheduler

    results = {field.name for field in dataclasses.fields(base.KVConnectorTransferResults)}
    assert results == {"finished_sending", "finished_recving", "failed_recving"}
    assert "failed_recving" in inspect.getsource(Scheduler.update_from_output)
    assert "recompute_kv_load_failures" in inspect.getsource(Scheduler._handle_failed_recving)
    assert KVTransferConfig(kv_load_failure_policy="recompute").engine_id


def test_the_cache_is_bound_before_ranks_are_known_and_reads_end_in_a_step(base: Any) -> None:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    assert "connector.bind_kv_cache_manager(" in inspect.getsource(Scheduler.__init__)
    source = inspect.getsource(EngineCore.__init__)
    assert source.index("self.scheduler:") < source.index("set_xfer_handshake_metadata_pp_aware(")
    ended = inspect.getsource(Scheduler._update_from_kv_xfer_finished)
    assert ended.index("update_connector_output(") < ended.index("finished_recving_kv_req_ids")
    assert (
        "is None:" in inspect.getsource(Scheduler.schedule).split("get_num_new_matched_tokens")[1]
    )
    assert names(BlockPool.get_cached_block) == ["self", "block_hash", "kv_cache_group_ids"]


def test_blocks_have_the_same_keys_in_all_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import CacheConfig
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    function = get_hash_fn_by_name(CacheConfig().prefix_caching_hash_algo)
    assert kv_cache_utils.resolve_none_hash_seed(function) == "vllm-none-hash"


def test_the_fields_of_a_scheduled_request_have_their_names() -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request, RequestStatus

    source = inspect.getsource(Request.__init__)
    for attribute in (
        *("request_id", "prompt_token_ids", "num_prompt_tokens", "kv_transfer_params"),
        *("lora_request", "cache_salt", "mm_features", "status"),
        *("block_hashes", "skip_reading_prefix_cache"),
    ):
        assert f"self.{attribute}" in source, attribute
    assert {"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"} <= set(RequestStatus.__members__)
    assert {field.name for field in dataclasses.fields(KVCacheBlocks)} == {"blocks"}
    assert "block_id" in {field.name for field in dataclasses.fields(KVCacheBlock)}


def test_steps_are_ordered_before_their_tokens_count_as_computed() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.sched.scheduler import Scheduler

    source = inspect.getsource(Scheduler.schedule)
    ordered = source.index("_build_kv_connector_meta(self.connector")
    assert ordered < source.index("_update_after_schedule(")
    assert "num_computed_tokens +=" in inspect.getsource(Scheduler._update_after_schedule)
    assert "_kv_cache_manager" in inspect.getsource(KVConnectorBase_V1.bind_kv_cache_manager)


def test_statistics_reach_the_page_of_metrics(connector: Any) -> None:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm

    assert "build_prom_metrics" in inspect.getsource(KVConnectorProm.__init__)
    registry = CollectorRegistry()

    def in_registry(kind: Any) -> Any:
        return lambda **options: kind(registry=registry, **options)

    kinds = {kind: in_registry(kind) for kind in (Counter, Gauge, Histogram)}

    class Config:
        kv_transfer_config = None

    series = connector.build_prom_metrics(Config(), kinds, ["engine"], {0: ["0"]})
    from cleave_worker.transfer.handoff import RefusalReason
    from cleave_worker.transfer.transport import Transport

    transfers = connector.build_kv_connector_stats()
    transfers.record_pull(Transport.GLOO, 0.5, 1000)
    transfers.record_refusal(RefusalReason.PROMPT)
    transfers.record_expired(2)
    transfers.record_prefix("pulled")
    transfers.record_prefix(RefusalReason.LAPSED)
    other = connector.build_kv_connector_stats(transfers.data)
    series.observe(transfers.aggregate(other.clone_and_reset()).data)
    page = generate_latest(registry).decode()
    assert 'cleave_kv_pulled_bytes_total{engine="0",transport="gloo"} 2000.0' in page
    assert 'cleave_kv_pull_seconds_sum{engine="0",transport="gloo"} 1.0' in page
    assert 'reason="prompt"} 2.0' in page
    assert 'reason="expired"} 4.0' in page
    assert 'reason="boot"} 0.0' in page
    for outcome, number in (("pulled", 2), ("lapsed", 2), ("missing", 0)):
        assert f'cleave_prefix_pulls_total{{engine="0",outcome="{outcome}"}} {number}.0' in page


def test_the_fields_of_a_scheduler_step_have_their_names() -> None:
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

    for options, used in (
        (SchedulerOutput, {"scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens"}),
        (SchedulerOutput, {"preempted_req_ids"}),
        (NewRequestData, {"req_id", "block_ids", "num_computed_tokens"}),
        (CachedRequestData, {"req_ids", "new_block_ids", "num_computed_tokens"}),
    ):
        assert used <= {field.name for field in dataclasses.fields(options)}


def test_layers_and_steps_are_said_to_be_done_when_they_are() -> None:
    from vllm.config import ParallelConfig
    from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
    from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

    source = inspect.getsource(maybe_transfer_kv_layer)
    assert source.index("result = func(") < source.index("connector.save_kv_layer(layer_name")
    step = inspect.getsource(KVConnectorModelRunnerMixin._get_kv_connector_output.__wrapped__)
    order = [step.index(word) for word in ("bind_connector_metadata", "yield", "wait_for_save")]
    assert order == sorted(order)
    assert isinstance(ParallelConfig.use_ubatching, property)
