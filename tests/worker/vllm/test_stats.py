"""The stat logger, fed with vLLM's own statistics objects."""

import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from cleave.shm.load_page import ENV, LoadPage, LoadSnapshot

pytestmark = [
    pytest.mark.vllm,
    # vLLM and what it imports warn of their own future.
    pytest.mark.filterwarnings("ignore"),
]
CONFIG = SimpleNamespace(
    cache_config=SimpleNamespace(num_gpu_blocks=100, enable_prefix_caching=True),
    parallel_config=SimpleNamespace(data_parallel_index=0, world_size=2),
)


@pytest.fixture
def stats() -> ModuleType:
    pytest.importorskip("vllm")
    return importlib.import_module("cleave_worker.vllm.stats")


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(ENV, str(tmp_path / "load"))
    with LoadPage(tmp_path / "load") as opened:
        yield opened


def scheduler(**values: float):
    from vllm.v1.metrics.stats import SchedulerStats

    return SchedulerStats(**values)


def iteration(computed: int = 0, prompts: int = 0, preempted: int = 0):
    from vllm.v1.metrics.stats import IterationStats

    stats = IterationStats()
    stats.prompt_token_stats.computed = computed
    stats.time_to_first_tokens_iter = [0.1] * prompts
    stats.num_preempted_reqs = preempted
    return stats


def test_vllm_finds_the_stat_logger_through_its_entry_point(stats: ModuleType) -> None:
    from vllm.v1.metrics.loggers import load_stat_logger_plugin_factories

    assert stats.LoadPageStatLogger in load_stat_logger_plugin_factories()


def test_an_engine_that_has_not_worked_yet_reports_its_free_blocks(
    stats: ModuleType, page: LoadPage
) -> None:
    stats.LoadPageStatLogger(CONFIG).log_engine_initialized()
    load = page.read()
    assert (load.kv_blocks_free, load.kv_blocks_total) == (100, 100)
    assert load.sampled_ns > 0


def test_every_step_is_stored_and_deferred_requests_count_as_waiting(
    stats: ModuleType, page: LoadPage
) -> None:
    logger = stats.LoadPageStatLogger(CONFIG)
    logger.record(
        scheduler(
            num_running_reqs=3,
            num_waiting_reqs=2,
            num_skipped_waiting_reqs=4,
            kv_cache_usage=0.25,
        ),
        None,
    )
    load = page.read()
    assert (load.num_running, load.num_waiting, load.kv_blocks_free) == (3, 6, 75)
    assert load.kv_cache_usage == 0.25


def test_waiting_prompts_are_assumed_as_long_as_recent_ones(
    stats: ModuleType, page: LoadPage
) -> None:
    logger = stats.LoadPageStatLogger(CONFIG)
    logger.record(scheduler(), iteration(computed=3000, prompts=2))
    logger.record(scheduler(num_waiting_reqs=4), iteration())
    assert page.read().pending_prompt_tokens == 6000
    for _ in range(200):
        logger.record(scheduler(num_waiting_reqs=4), iteration(computed=1, prompts=1))
    assert page.read().pending_prompt_tokens == 4


def test_preemptions_are_counted_since_boot(stats: ModuleType, page: LoadPage) -> None:
    logger = stats.LoadPageStatLogger(CONFIG)
    logger.record(scheduler(), iteration(preempted=2))
    logger.record(scheduler(), iteration(preempted=1))
    assert page.read().num_preemptions == 3


def test_lookups_in_the_prefix_cache_are_counted_since_boot(
    stats: ModuleType, page: LoadPage
) -> None:
    from vllm.v1.metrics.stats import PrefixCacheStats

    logger = stats.LoadPageStatLogger(CONFIG)
    for queries, hits in ((100, 16), (50, 32)):
        cache = PrefixCacheStats(requests=1, queries=queries, hits=hits)
        logger.record(scheduler(prefix_cache_stats=cache), iteration())
    logger.record(scheduler(prefix_cache_stats=None), iteration())
    load = page.read()
    assert (load.prefix_cache_queries, load.prefix_cache_hits) == (150, 48)


def test_an_engine_without_prefix_cache_counts_its_prompts_as_not_found(
    stats: ModuleType, page: LoadPage
) -> None:
    cache = SimpleNamespace(num_gpu_blocks=100, enable_prefix_caching=False)
    config = SimpleNamespace(cache_config=cache, parallel_config=CONFIG.parallel_config)
    logger = stats.LoadPageStatLogger(config)
    prompts = iteration(computed=300)
    for _ in range(2):
        logger.record(scheduler(prefix_cache_stats=None), prompts)
    load = page.read()
    assert (load.prefix_cache_queries, load.prefix_cache_hits) == (600, 0)


def test_copies_from_host_memory_are_counted_with_the_time_of_one_gpu(
    stats: ModuleType, page: LoadPage
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.metrics.stats import PrefixCacheStats

    own = OffloadingConnectorStats()
    own.increase_counter("vllm:kv_offload_load_time", 0.004)
    found = PrefixCacheStats()
    sources = {CacheHitSource.HOST: 256, CacheHitSource.P2P: 64}
    found.record(1_000, 320, preempted=False, hits_by_source=sources)
    logger = stats.LoadPageStatLogger(CONFIG)
    for connectors in ({"OffloadingConnector": own.to_dict()}, own.to_dict(), {"Other": {}}):
        step = scheduler(connector_prefix_cache_stats=found, kv_connector_stats=connectors)
        logger.record(step, None)
    load = page.read()
    # Both GPUs took 4 ms together, twice.
    assert (load.host_kv_hits, load.host_kv_load_ms) == (3 * 256, 4.0)


def test_missing_statistics_leave_the_page_alone(stats: ModuleType, page: LoadPage) -> None:
    logger = stats.LoadPageStatLogger(CONFIG)
    logger.record(None, None)
    assert page.read() == LoadSnapshot()


def test_vllm_without_an_agent_is_not_changed(
    stats: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(ENV, raising=False)
    logger = stats.LoadPageStatLogger(CONFIG)
    logger.log_engine_initialized()
    logger.record(scheduler(num_running_reqs=1), iteration())
    assert list(tmp_path.iterdir()) == []


def test_a_data_parallel_rank_writes_its_own_load_and_no_other_ones(
    stats: ModuleType, page: LoadPage
) -> None:
    config = SimpleNamespace(
        cache_config=CONFIG.cache_config,
        parallel_config=SimpleNamespace(data_parallel_index=1, world_size=1),
    )
    stats.LoadPageStatLogger(config, 0).log_engine_initialized()
    assert page.read() == LoadSnapshot()
    stats.LoadPageStatLogger(config, 1).log_engine_initialized()
    assert page.read().kv_blocks_total == 100
