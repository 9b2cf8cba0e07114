"""The one state of a worker."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from cleave.rpc.v1 import agent_pb2
from cleave.shm.load_page import LoadPage, LoadSnapshot
from cleave_worker.agent.config import AgentConfig
from cleave_worker.agent.instance import (
    BootMismatch,
    EnginePages,
    ServedEngineInfo,
    StaleEpoch,
    WorkerInstance,
)

FACTS = ServedEngineInfo("emulated", 2048, 16)
PROVEN = agent_pb2.KvPath(verified=True, transport="emulated", transfer_ms=1.5)


@pytest.fixture
def instance(config: AgentConfig, tmp_path: Path):
    with LoadPage(tmp_path / "load") as page:
        page.write(LoadSnapshot(num_running=3, kv_blocks_free=7, kv_blocks_total=9))
        worker = WorkerInstance(config)
        worker.start_boot("b1", "http://h:1", EnginePages(page))
        yield worker


async def test_load_reports_have_the_hits_of_the_prefix_cache(
    config: AgentConfig, tmp_path: Path
) -> None:
    with LoadPage(tmp_path / "hits") as page:
        page.write(
            LoadSnapshot(
                prefix_cache_queries=100,
                prefix_cache_hits=48,
                host_kv_hits=32,
                host_kv_load_ms=1.5,
            )
        )
        worker = WorkerInstance(config)
        worker.start_boot("b1", "http://h:1", EnginePages(page))
        load = worker.build_load_report()
    assert (load.prefix_cache_queries, load.prefix_cache_hits) == (100, 48)
    assert (load.host_kv_hits, load.host_kv_load_ms) == (32, 1.5)


def test_the_age_of_the_oldest_block_is_that_at_the_report(
    instance: WorkerInstance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = 100_000_000_000
    monkeypatch.setattr("time.monotonic_ns", lambda: now_ns)
    assert instance.build_load_report().oldest_kv_ms == 0
    with LoadPage(tmp_path / "load") as page:
        page.write_oldest_kv(now_ns - 5_000_000_000)
        assert instance.build_load_report().oldest_kv_ms == 5_000
        # The engine has written nothing since.
        now_ns += 2_000_000_000
        assert instance.build_load_report().oldest_kv_ms == 7_000
        page.write_oldest_kv(now_ns - 1)
        assert instance.build_load_report().oldest_kv_ms == 1, "0 is for nothing"
        page.write_oldest_kv(0)
        assert instance.build_load_report().oldest_kv_ms == 0


def test_the_registration_has_the_host_memory_of_this_engine(instance: WorkerInstance) -> None:
    report = '{"hostMemory": {"tokens": 500, "tokenMs": 0.01}}'
    instance.set_engine_info(replace(FACTS, model_report=report))
    registration = instance.copy_registration()
    assert (registration.host_kv_tokens, registration.host_kv_token_ms) == (500, 0.01)
    instance.set_engine_info(FACTS)
    assert instance.copy_registration().host_kv_tokens == 0


async def test_the_way_to_ready_leads_through_verifying(instance: WorkerInstance) -> None:
    seen = [instance.state]
    instance.set_engine_info(FACTS)
    seen.append(instance.state)
    instance.mark_verified(PROVEN)
    seen.append(instance.state)
    assert seen == [agent_pb2.STATE_STARTING, agent_pb2.STATE_VERIFYING, agent_pb2.STATE_READY]
    registration = instance.copy_registration()
    assert (registration.reason, registration.kv_path.verified, registration.kv_blocks_total) == (
        "",
        True,
        9,
    )


def test_the_registration_names_the_cell(config: AgentConfig) -> None:
    assert WorkerInstance(config).copy_registration().cell == ""
    assert WorkerInstance(replace(config, cell="0")).copy_registration().cell == "0"


@pytest.mark.parametrize(("transfer", "tokens"), [("pull", 0), ("perlayer", 1), ("auto", 0)])
def test_the_registration_contains_the_layerwise_address_and_prompt_limit(
    config: AgentConfig, tmp_path: Path, transfer: str, tokens: int
) -> None:
    worker = WorkerInstance(replace(config, connector="cleave", transfer=transfer))
    with LoadPage(tmp_path / "load") as page:
        worker.start_boot("b1", "http://h:1", EnginePages(page), kv_port=5601)
        registration = worker.copy_registration()
    assert (registration.kv_port, registration.ahead_from_tokens) == (5601, tokens)


def test_the_registration_says_where_the_prefix_cache_can_be_pulled_from(
    instance: WorkerInstance, tmp_path: Path
) -> None:
    with LoadPage(tmp_path / "load") as page:
        instance.start_boot("b1", "http://h:1", EnginePages(page))
        instance.set_prefix_port(5602)
        assert instance.copy_registration().prefix_port == 5602
        instance.start_boot("b2", "http://h:1", EnginePages(page))
        assert instance.copy_registration().prefix_port == 0


async def test_reports_carry_the_load_page(instance: WorkerInstance) -> None:
    report = instance.build_load_report()
    assert (report.boot_id, report.num_running, report.kv_blocks_free) == ("b1", 3, 7)


async def test_the_numbers_of_a_dead_engine_are_not_reported(instance: WorkerInstance) -> None:
    instance.detach_pages()
    assert instance.build_load_report().num_running == 0


async def test_a_lost_engine_must_prove_its_kv_path_again(
    instance: WorkerInstance, tmp_path: Path
) -> None:
    instance.set_engine_info(FACTS)
    instance.mark_verified(PROVEN)
    instance.mark_engine_lost("killed")
    with LoadPage(tmp_path / "second") as page:
        instance.start_boot("b2", "http://h:2", EnginePages(page))
    registration = instance.copy_registration()
    assert (registration.boot_id, registration.restarts, registration.kv_path.verified) == (
        "b2",
        1,
        False,
    )


async def test_the_last_failure_of_an_engine_is_reported_as_long_as_its_agent_lives(
    instance: WorkerInstance, tmp_path: Path
) -> None:
    assert instance.copy_registration().last_failure == ""
    instance.mark_engine_lost("engine ended with status 1: OSError: no such model")
    with LoadPage(tmp_path / "second") as page:
        instance.start_boot("b2", "http://h:2", EnginePages(page))
        registration = instance.copy_registration()
        assert registration.reason == f"engine starts again: {registration.last_failure}"
        instance.set_engine_info(FACTS)
    instance.mark_verified(PROVEN)
    registration = instance.copy_registration()
    assert registration.reason == ""
    assert registration.last_failure == "engine ended with status 1: OSError: no such model"


async def test_what_a_starting_engine_does_is_a_part_of_the_reason(
    instance: WorkerInstance, tmp_path: Path
) -> None:
    with LoadPage(tmp_path / "first") as page:
        instance.start_boot("b1", "http://h:1", EnginePages(page))
        instance.report_start_stage("")
        version = instance.version
        for _ in range(3):
            instance.report_start_stage("loads weights, 40 %")
        assert instance.version == version + 1, "watchers hear only of changes"
        assert instance.copy_registration().reason == "engine starts: loads weights, 40 %"
        instance.mark_engine_lost("it ended")
        instance.start_boot("b2", "http://h:1", EnginePages(page))
        instance.report_start_stage("compiles")
        assert instance.copy_registration().reason == "engine starts again (compiles): it ended"
        instance.set_engine_info(FACTS)
        instance.report_start_stage("compiles")
        assert instance.state == agent_pb2.STATE_VERIFYING


async def test_a_failed_test_keeps_a_new_worker_from_ready(instance: WorkerInstance) -> None:
    instance.set_engine_info(FACTS)
    instance.mark_verification_failed("wrong tokens")
    assert instance.state == agent_pb2.STATE_VERIFYING
    assert instance.copy_registration().reason == "wrong tokens"


async def test_a_failed_test_leaves_a_serving_worker_ready_but_unverified(
    instance: WorkerInstance,
) -> None:
    instance.set_engine_info(FACTS)
    instance.mark_unverified("no peer yet")
    instance.mark_verification_failed("wrong tokens")
    registration = instance.copy_registration()
    assert registration.state == agent_pb2.STATE_READY
    assert not registration.kv_path.verified
    assert registration.kv_path.detail == "wrong tokens"


async def test_adapters_are_registered_until_another_boot_has_others(
    instance: WorkerInstance,
) -> None:
    instance.set_engine_info(replace(FACTS, adapters=("sql", "law")))
    instance.mark_engine_lost("killed")
    assert instance.copy_registration().adapters == ["sql", "law"]
    instance.set_engine_info(replace(FACTS, adapters=("law",)))
    assert instance.copy_registration().adapters == ["law"]


async def test_nothing_leads_back_from_draining(instance: WorkerInstance) -> None:
    instance.drain()
    instance.set_engine_info(FACTS)
    instance.mark_verified(PROVEN)
    instance.mark_engine_lost("killed")
    registration = instance.copy_registration()
    assert (registration.state, registration.reason) == (agent_pb2.STATE_DRAINING, "drains")
    assert (registration.restarts, registration.last_failure) == (0, "")


async def test_a_role_needs_a_newer_epoch_and_the_present_boot(instance: WorkerInstance) -> None:
    instance.set_role(agent_pb2.ROLE_DECODE, 2, "b1")
    with pytest.raises(StaleEpoch):
        instance.set_role(agent_pb2.ROLE_MIXED, 2, "")
    with pytest.raises(BootMismatch):
        instance.set_role(agent_pb2.ROLE_MIXED, 3, "b0")
    assert instance.copy_registration().role == agent_pb2.ROLE_DECODE
    instance.drain()
    with pytest.raises(StaleEpoch):
        instance.set_role(agent_pb2.ROLE_MIXED, 3, "b1")


async def test_followers_wake_at_every_change(instance: WorkerInstance) -> None:
    woken = asyncio.create_task(instance.wait_for_change(60))
    await asyncio.sleep(0)
    assert not woken.done()
    instance.drain()
    await asyncio.wait_for(woken, 10)


async def test_the_report_about_the_model_is_that_of_the_present_engine(
    instance: WorkerInstance, tmp_path: Path
) -> None:
    instance.set_engine_info(replace(FACTS, model_report="{}"))
    assert instance.copy_registration().model_report == "{}"
    with LoadPage(tmp_path / "second") as page:
        instance.start_boot("b2", "http://h:2", EnginePages(page))
    assert instance.copy_registration().model_report == ""
