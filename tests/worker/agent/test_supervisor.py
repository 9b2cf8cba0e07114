"""When an engine is started again, and when it is taken for stalled."""

import asyncio
import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from cleave.rpc.http_client import HttpError
from cleave.shm.load_page import LoadSnapshot
from cleave_worker.agent import engine_api, supervisor
from cleave_worker.agent.config import AgentConfig, AgentTiming
from cleave_worker.agent.launch import Boot
from cleave_worker.agent.supervisor import (
    EngineFault,
    EngineSupervisor,
    compute_restart_delay,
    is_stalled,
    open_pages,
)

SECOND = 10**9


def test_restarts_come_later_and_later_up_to_a_bound() -> None:
    delays = [
        compute_restart_delay(deaths, AgentTiming()) for deaths in (0, 1, 2, 3, 4, 5, 6, 1000)
    ]
    assert delays == [1, 2, 4, 8, 16, 30, 30, 30]


@pytest.mark.parametrize(
    ("load", "stalled"),
    [
        (LoadSnapshot(num_running=1, sampled_ns=SECOND), True),
        (LoadSnapshot(num_waiting=1, sampled_ns=SECOND), True),
        (LoadSnapshot(num_running=1, sampled_ns=95 * SECOND), False),
        (LoadSnapshot(sampled_ns=SECOND), False),
        (LoadSnapshot(), False),
    ],
)
def test_only_an_engine_with_work_can_stall(load: LoadSnapshot, stalled: bool) -> None:
    assert is_stalled(load, now_ns=100 * SECOND, seconds=10) == stalled


def test_a_full_disk_is_a_fault_of_this_boot_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with monkeypatch.context() as full:
        full.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(EngineFault, match=f"{tmp_path}: .*No space left"), open_pages():
            pass
    assert not list(tmp_path.iterdir())
    with open_pages() as (folder, pages):
        assert folder.parent == tmp_path
        assert pages.load.read().num_running == 0


@pytest.mark.parametrize(("engine", "port"), [("emulated", 2), ("vllm", 3)])
def test_vllm_serves_its_prefix_cache_at_a_port_of_its_own(
    config_of: Callable[..., AgentConfig], tmp_path: Path, engine: str, port: int
) -> None:
    boot = Boot("b1", engine_port=1, kv_port=2, prefix_port=3, load_page=tmp_path / "load")
    assert supervisor.choose_prefix_port(config_of(engine=engine), boot) == port


@pytest.mark.parametrize(
    ("engine", "answer", "steps"),
    [
        ("vllm", "", ["warm up", 3, "info {}", "verify"]),
        ("vllm", "400: no", ["warm up", 3, "info {}", "verify"]),
        ("vllm", HttpError("no answer"), ["warm up"]),
        # Nothing listens there.
        ("emulated", "", ["info {}", "verify"]),
    ],
)
async def test_vllm_answers_a_request_before_it_may_become_ready(
    config_of: Callable[..., AgentConfig],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    engine: str,
    answer: str | HttpError,
    steps: list[str | int],
) -> None:
    taken: list[str | int] = []

    async def check_health(*_: object) -> str:
        return ""

    async def fetch_info(*_: object, model_report: str) -> str:
        return f"info{model_report}"

    async def is_listening(host: str, port: int, seconds: float) -> bool:
        return port == 3

    async def warm_up(*_: object) -> str:
        taken.append("warm up")
        if isinstance(answer, HttpError):
            raise answer
        return answer

    async def keep_verified(*_: object) -> None:
        taken.append("verify")
        raise EngineFault("enough")

    async def keep_loaded(*_: object) -> None:
        await asyncio.sleep(60)

    for function in (check_health, fetch_info, is_listening, warm_up):
        monkeypatch.setattr(engine_api, function.__name__, function)
    monkeypatch.setattr(supervisor, "keep_verified", keep_verified)
    monkeypatch.setattr(supervisor, "keep_loaded", keep_loaded)
    instance = SimpleNamespace(set_engine_info=taken.append, set_prefix_port=taken.append)
    (tmp_path / "model.json").write_text(" {}")
    ports = {"engine_port": 1, "kv_port": 2, "prefix_port": 3}
    boot = Boot("b1", **ports, load_page=tmp_path / "load", engine_key="key")
    supervised = EngineSupervisor(config_of(engine=engine), instance, (), gpu=False)
    with pytest.raises(EngineFault):
        await asyncio.wait_for(supervised._supervise("http://e", boot), 10)
    assert taken == steps


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("KeyError: 'a'", "KeyError: 'a' (/health: refused, 3 times in a row)"),
        ("", "/health: refused, 3 times in a row"),
    ],
)
async def test_an_engine_that_answers_no_more_is_said_to_end_by_its_own_error(
    config_of: Callable[..., AgentConfig], monkeypatch: pytest.MonkeyPatch, written: str, said: str
) -> None:
    async def check_health(*_: object) -> str:
        return "/health: refused"

    monkeypatch.setattr(engine_api, "check_health", check_health)
    timing = AgentTiming(health_interval=0, health_retry=0)
    instance = SimpleNamespace(load=LoadSnapshot())
    supervised = EngineSupervisor(config_of(timing=timing), instance, (), gpu=False)
    supervised._process = SimpleNamespace(fault=written)
    with pytest.raises(EngineFault) as lost:
        await supervised._watch_health("http://e")
    assert str(lost.value) == said
