"""The share of an engine on another node than its agent."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from cleave.rpc.v1 import agent_pb2
from cleave.shm.load_page import LoadPage
from cleave_worker.agent import worker_node
from cleave_worker.agent.config import AgentConfig
from cleave_worker.agent.drain import DrainResult
from cleave_worker.agent.instance import EnginePages, WorkerInstance
from cleave_worker.agent.launch import Launch, find_free_port
from cleave_worker.agent.service import AgentServer
from cleave_worker.agent.weights.loaded_weights import ReadSource, Weights, build_weights
from cleave_worker.agent.weights.weight_sources import WeightSource
from cleave_worker.agent.worker_node import (
    LeaderTiming,
    WorkerNode,
    WorkerNodeConfig,
    build_launch,
    parse,
)

LINE = [
    *("--leader", "x.chat-workers.llm.svc:9000", "--host", "127.0.0.1", "--model", "org/model"),
    *("--tensor-parallel-size", "8", "--pipeline-parallel-size", "2", "--drain-timeout", "30"),
    *("--", "--nnodes", "2", "--node-rank", "1", "--master-addr", "x.chat-workers.llm.svc"),
]

WEIGHTS = Weights("a1")


class Leader:
    """An agent whose engine the test starts."""

    def __init__(self, config: AgentConfig, load_page: LoadPage) -> None:
        self._config = config
        self.instance = WorkerInstance(config)
        self.server = AgentServer(self.instance, self._drain, self._prove, config.address)
        self.num_drains = 0
        self._pages = EnginePages(load_page)

    def boots(self, boot_id: str, weights: Weights = WEIGHTS) -> None:
        url, key = f"http://{self._config.host}:1", f"key of {boot_id}"
        self.instance.start_boot(boot_id, url, self._pages, engine_key=key, weights=weights)

    async def _prove(self, role: int) -> None:
        """No request comes."""

    async def _drain(self, seconds: float | None) -> DrainResult:
        self.num_drains += 1
        return DrainResult(is_empty=True, num_remaining=0)


class Shares:
    """Processes that stand in for vLLM, and for which boots they were started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
        self.boots: list[str] = []
        self._program = program
        monkeypatch.setattr(worker_node, "build_launch", self._launched)
        monkeypatch.setattr(worker_node, "read_weights", self._read)

    async def _read(self, config, env, report) -> Weights:
        return WEIGHTS

    def _launched(self, config, leader, weights, folder, gpu, env) -> Launch:
        self.boots.append(leader.boot_id)
        return Launch((sys.executable, "-c", self._program), dict(env))


@pytest.fixture
def load_page(tmp_path: Path) -> Iterator[LoadPage]:
    with LoadPage(tmp_path / "load") as page:
        yield page


@pytest.fixture
async def leader(config: AgentConfig, load_page: LoadPage) -> AsyncIterator[Leader]:
    own = AgentConfig(**{**_fields(config), "port": find_free_port(config.host)})
    leader_node = Leader(own, load_page)
    await leader_node.server.start()
    yield leader_node
    leader_node.instance.end()
    await leader_node.server.stop(0)


def _fields(config: AgentConfig) -> dict:
    return {name: getattr(config, name) for name in AgentConfig.__dataclass_fields__}


def following(leader: Leader, lost: float = 60.0) -> WorkerNode:
    engine = AgentConfig(**{**_fields(leader._config), "engine": "vllm"})
    patience = LeaderTiming(poll_interval=0.01, leader_timeout=lost)
    return WorkerNode(WorkerNodeConfig(leader._config.address, engine, patience), gpu=False)


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - of another task, which sends no signal
            await asyncio.sleep(0.01)


def test_a_share_is_a_part_of_vllm_with_the_leaders_engine_id(tmp_path: Path) -> None:
    leader = agent_pb2.Registration(boot_id="boot1", engine_key="secret")
    source = WeightSource("--model", "org/model", pin="--revision")
    weights = build_weights(0.0, [ReadSource(source, "x", commit="c" * 40)])
    launch = build_launch(parse(LINE), leader, weights, tmp_path, True, {})
    assert launch.env["CLEAVE_ENGINE_KEY"] == "secret"
    line = list(launch.argv)
    assert line[line.index("-m") + 1] == "cleave_worker.vllm.headless"
    assert line[line.index("--model") + 1] == "org/model"
    assert json.loads(line[line.index("--kv-transfer-config") + 1])["engine_id"] == "boot1"
    assert line[line.index("--tensor-parallel-size") + 1] == "8"
    # All nodes load the commit that was compared.
    assert line[-8:] == [*LINE[-6:], "--revision", "c" * 40]
    assert launch.env["CLEAVE_WEIGHTS"] == weights.id


def test_without_a_leader_it_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--host", "127.0.0.1", "--model", "org/model"])
    assert ended.value.code == 2
    assert "--leader" in capsys.readouterr().err


async def test_a_share_waits_for_the_leaders_engine_and_follows_it_to_the_next(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = Shares(monkeypatch, "import time; time.sleep(60)")
    one = following(leader)
    running = asyncio.create_task(one.run())
    await asyncio.sleep(0.1)
    assert shares.boots == []
    leader.boots("a")
    await until(lambda: shares.boots == ["a"])
    leader.boots("b")
    await until(lambda: shares.boots == ["a", "b"])
    one.stop()
    assert await running == 0


async def test_on_sigterm_the_leader_is_drained_first(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = Shares(monkeypatch, "import time; time.sleep(60)")
    one = following(leader)
    running = asyncio.create_task(one.run())
    leader.boots("a")
    await until(lambda: shares.boots)
    one.stop()
    assert await running == 0
    assert leader.num_drains == 1


async def test_a_share_that_ends_by_itself_ends_the_follower(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    Shares(monkeypatch, "import sys; sys.exit(3)")
    leader.boots("a")
    async with asyncio.timeout(30):
        assert await following(leader).run() == 1
    assert leader.num_drains == 0


async def test_a_share_ends_with_its_leader_and_waits_for_the_next(
    leader: Leader, load_page: LoadPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = Shares(monkeypatch, "import time; time.sleep(60)")
    one = following(leader, lost=0.2)
    running = asyncio.create_task(one.run())
    leader.boots("a")
    await until(lambda: shares.boots == ["a"])
    leader.instance.end()
    await leader.server.stop(0)
    again = Leader(leader._config, load_page)
    await again.server.start()
    again.boots("b")
    await until(lambda: shares.boots == ["a", "b"])
    one.stop()
    assert await running == 0
    again.instance.end()
    await again.server.stop(0)


async def test_a_share_follows_a_leader_of_a_newer_version(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = Shares(monkeypatch, "import time; time.sleep(60)")
    leader.instance._registration.role = 9
    one = following(leader)
    running = asyncio.create_task(one.run())
    leader.instance._registration.boot_id = "a"
    leader.instance._registration.weights = WEIGHTS.id
    leader.instance._enter_state(9, "of a newer version")
    await until(lambda: shares.boots == ["a"])
    one.stop()
    assert await running == 0


async def test_a_share_with_other_files_than_its_leader_does_not_start(
    leader: Leader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shares = Shares(monkeypatch, "import time; time.sleep(60)")
    leader.boots("a", Weights("b2"))
    async with asyncio.timeout(30):
        assert await following(leader).run() == 1
    assert not shares.boots
    assert "this node has weights a1, that of w-0 b2: give all nodes" in caplog.text
