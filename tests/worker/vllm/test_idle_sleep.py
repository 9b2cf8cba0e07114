"""vLLM on CPU sleeps while it waits."""

from types import ModuleType

import pytest

from cleave.shm.load_page import ENV
from cleave_worker.vllm.idle_sleep import MESSAGE_POLL_S, NIXL_POLL_US, sleep_while_waiting


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """vLLM's messages, restored afterwards."""
    messages: ModuleType = pytest.importorskip(
        "vllm.distributed.device_communicators.shm_broadcast"
    )
    utils = pytest.importorskip("vllm.distributed.utils")
    for module in (messages, utils):
        monkeypatch.setattr(module, "sched_yield", module.sched_yield)
    return messages


def test_looks_for_a_message_are_apart(cpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV, "/dev/null")
    _keep_nixl(monkeypatch)
    sleep_while_waiting()
    slept: list[float] = []
    monkeypatch.setattr("cleave_worker.vllm.idle_sleep.time.sleep", slept.append)
    cpu.sched_yield()
    assert slept == [MESSAGE_POLL_S]


def test_progress_threads_of_transfers_sleep_between_events(
    cpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV, "/dev/null")
    api = _keep_nixl(monkeypatch)
    sleep_while_waiting()
    config = api.nixlBind.nixlAgentConfig()
    config.pthrDelay = 0
    config.useProgThread = True
    assert (config.pthrDelay, config.useProgThread) == (NIXL_POLL_US, True)


def test_an_engine_without_an_agent_is_left_alone(
    cpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENV, raising=False)
    before = cpu.sched_yield
    sleep_while_waiting()
    assert cpu.sched_yield is before


def _keep_nixl(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("nixl")
    api: ModuleType = pytest.importorskip("nixl._api")
    monkeypatch.setattr(api.nixlBind, "nixlAgentConfig", api.nixlBind.nixlAgentConfig)
    return api
