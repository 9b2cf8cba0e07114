"""The oldest use of vLLM's own block pool, as the agent reads it."""

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cleave.shm.load_page import ENV, LoadPage, LoadSnapshot
from cleave_worker.emulator import blocks as emulated
from cleave_worker.scheduling.block_uses import BlockUses

pytestmark = [
    pytest.mark.vllm,
    # vLLM and what it imports warn of their own future.
    pytest.mark.filterwarnings("ignore"),
]
BLOCK_SIZE, NUM_BLOCKS = 4, 9
"""One of the blocks is vLLM's null block."""


@pytest.fixture
def pool() -> Any:
    block_pool = pytest.importorskip("vllm.v1.core.block_pool", reason="needs the group worker-cpu")
    return block_pool.BlockPool(NUM_BLOCKS, enable_caching=True, hash_block_size=BLOCK_SIZE)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoadPage]:
    monkeypatch.setenv(ENV, str(tmp_path / "load"))
    with LoadPage(tmp_path / "load") as page:
        page.write(LoadSnapshot(num_running=1))
        yield page


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The collector's clock, set by the test."""
    clock = SimpleNamespace(ns=0)
    monkeypatch.setattr(BlockUses.__init__, "__defaults__", (lambda: clock.ns,))
    return clock


def observe(pool: Any, **more: Any) -> Any:
    from cleave_worker.vllm.kv.block_use_collector import observe_uses

    return observe_uses(SimpleNamespace(block_pool=pool, enable_caching=True, **more))


def make_key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def compute(pool: Any, first: int, count: int) -> list[Any]:
    """Blocks of a request, in the cache under keys from `first` on."""
    blocks = pool.get_new_blocks(count)
    keys = [make_key(number) for number in range(first, first + count)]
    request = SimpleNamespace(block_hashes=keys)
    pool.cache_full_blocks(request, blocks, 0, count, BLOCK_SIZE, 0)
    return blocks


def test_the_page_has_the_oldest_use(pool: Any, page: LoadPage, clock: SimpleNamespace) -> None:
    collector = observe(pool)
    for number in range(2):
        clock.ns += 10
        pool.free_blocks(reversed(compute(pool, 4 * number, 4)))
    assert page.read().oldest_kv_ns == 0, "written once a step"
    collector.publish()
    assert page.read().oldest_kv_ns == 10
    clock.ns = 100
    pool.get_new_blocks(3)
    collector.publish()
    assert page.read().oldest_kv_ns == 10, "the first block of the first request is left"
    pool.touch(pool.get_cached_block(make_key(0), [0]))
    collector.publish()
    assert page.read().oldest_kv_ns == 20
    assert page.read().num_running == 1


def test_the_null_block_is_none(pool: Any, page: LoadPage, clock: SimpleNamespace) -> None:
    collector = observe(pool)
    clock.ns = 10
    pool.touch([pool.null_block] * 3)
    collector.publish()
    assert page.read().oldest_kv_ns == 0


def test_an_emptied_cache_is_reported_at_once(
    pool: Any, page: LoadPage, clock: SimpleNamespace
) -> None:
    collector = observe(pool)
    clock.ns = 10
    pool.free_blocks(compute(pool, 0, 3))
    collector.publish()
    assert page.read().oldest_kv_ns == 10
    clock.ns = 20
    assert pool.reset_prefix_cache()
    assert page.read().oldest_kv_ns == 20


def test_engines_without_an_agent_a_cache_or_a_free_place_are_not_observed(
    pool: Any, page: LoadPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector

    from cleave_worker.vllm.kv.block_use_collector import observe_uses

    assert observe_uses(SimpleNamespace(block_pool=pool, enable_caching=False)) is None
    own = pool.metrics_collector = KVCacheMetricsCollector()
    assert observe(pool) is None
    assert pool.metrics_collector is own
    pool.metrics_collector = None
    monkeypatch.delenv(ENV)
    assert observe(pool) is None
    assert pool.metrics_collector is None


def test_the_connector_observes_its_cache_and_writes_with_each_step(
    pool: Any, page: LoadPage, clock: SimpleNamespace
) -> None:
    from cleave_worker.transfer.sharding import ParallelShape
    from cleave_worker.vllm.kv.connector import CleaveConnector
    from cleave_worker.vllm.kv.scheduler_side import SchedulerSide

    connector = CleaveConnector.__new__(CleaveConnector)
    connector._kv_transfer_config = SimpleNamespace(
        kv_load_failure_policy="fail", is_kv_consumer=True
    )
    cache_config = SimpleNamespace(prefix_caching_hash_algo="xxhash")
    connector._vllm_config = SimpleNamespace(cache_config=cache_config)
    connector._scheduler = SchedulerSide("boot", BLOCK_SIZE, ParallelShape())
    connector._prefix_pulls = None
    connector.bind_kv_cache_manager(SimpleNamespace(block_pool=pool, enable_caching=True))
    clock.ns = 10
    pool.free_blocks(compute(pool, 0, NUM_BLOCKS - 1))
    connector.build_connector_meta(None)
    assert page.read().oldest_kv_ns == 10


@pytest.mark.parametrize("seed", range(8))
def test_emulated_engines_report_the_same(
    pool: Any, page: LoadPage, clock: SimpleNamespace, seed: int
) -> None:
    draw = random.Random(seed)
    collector, ours = observe(pool), emulated.BlockPool(NUM_BLOCKS - 1, BLOCK_SIZE)
    running: list[tuple[list[Any], list[int]]] = []
    keys: list[bytes] = []
    oldest = set()
    for _ in range(300):
        clock.ns += 1
        known = [key for key in keys if pool.get_cached_block(key, [0])]
        choice = draw.random()
        if running and choice < 0.5:
            theirs, own = running.pop(draw.randrange(len(running)))
            pool.free_blocks(reversed(theirs))
            ours.free(own)
        elif known and choice < 0.7:
            theirs = pool.get_cached_block(draw.choice(known), [0])
            pool.touch(theirs)
            running.append((theirs, ours.acquire_cached([bytes(theirs[0].block_hash[:32])])))
        elif ours.num_free >= 2:
            theirs, own = compute(pool, len(keys), 2), ours.allocate(2)
            keys += [make_key(number) for number in range(len(keys), len(keys) + 2)]
            for block, key in zip(own, keys[-2:], strict=True):
                ours.publish(block, key)
            running.append((theirs, own))
        assert ours.num_free == pool.get_num_free_blocks()
        collector.publish()
        assert page.read().oldest_kv_ns == ours.uses.oldest_ns
        oldest.add(ours.uses.oldest_ns)
    assert len(oldest) > 10
