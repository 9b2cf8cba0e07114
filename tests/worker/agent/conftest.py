"""Configs, loopback addresses and real agent processes."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import pytest

from cleave.rpc.credentials import TOKEN_ENV, Metadata, sign_with_token
from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc
from cleave_worker.agent.config import AgentConfig, AgentTiming

START_SECONDS = 60.0
QUICK = AgentTiming(
    start_poll=0.02,
    health_interval=0.02,
    restart_delay=0.01,
    restart_delay_max=0.05,
    peer_wait=0.1,
    peer_poll=0.01,
    peer_search=0.01,
    verify_timeout=5.0,
    verify_delay_max=0.02,
    quiet_period=0.05,
    drain_poll=0.01,
)


IMPATIENT = {
    "health_interval": 0.2,
    "health_retry": 0.1,
    "health_timeout": 5.0,
    "start_poll": 0.05,
    "restart_delay": 0.05,
    "peer_poll": 0.1,
}
RUN = """
import json, sys
from dataclasses import replace
from cleave_worker.agent import main
timing, parse = json.loads(sys.argv.pop(1)), main.parse
def impatient(argv):
    config = parse(argv)
    return replace(config, timing=replace(config.timing, **timing))
main.parse = impatient
sys.exit(main.main())
"""
"""The agent's own main with shorter times."""


@pytest.fixture
def host() -> str:
    """A loopback address that no other test uses now."""
    return f"127.{random.randint(100, 120)}.{random.randint(0, 255)}.{random.randint(1, 254)}"


@pytest.fixture
def config(host: str) -> AgentConfig:
    """An emulated prefill worker with short times."""
    return AgentConfig(
        name="w-0",
        deployment="d",
        revision="r1",
        role=agent_pb2.ROLE_PREFILL,
        model="opt-13b",
        served_model_name="m",
        engine="emulated",
        host=host,
        timing=QUICK,
    )


@pytest.fixture
def config_of(config: AgentConfig) -> Callable[..., AgentConfig]:
    """`config` with other values."""
    return lambda **values: replace(config, **values)


@dataclass
class AgentProcess:
    """An agent as pods run it."""

    name: str
    address: str
    process: subprocess.Popen
    log: Path
    channel: grpc.Channel = field(init=False)

    def __post_init__(self) -> None:
        self.channel = grpc.insecure_channel(self.address)

    @property
    def stub(self) -> agent_pb2_grpc.AgentStub:
        return agent_pb2_grpc.AgentStub(self.channel)

    def health(self) -> agent_pb2.HealthResponse:
        for _ in range(2):
            # A call that is signed before the agent starts is refused.
            with contextlib.suppress(grpc.RpcError):
                return self._call_health()
        return self._call_health()

    def _call_health(self) -> agent_pb2.HealthResponse:
        request, metadata = agent_pb2.HealthRequest(), self.sign()
        return self.stub.Health(request, timeout=20, wait_for_ready=True, metadata=metadata)

    def sign(self) -> Metadata:
        """What a call of it shows, if there is a token."""
        token_file = os.environ.get(TOKEN_ENV)
        return sign_with_token(Path(token_file), self.address) if token_file else ()

    def until(
        self,
        condition: Callable[[agent_pb2.Registration], bool],
        seconds: float = START_SECONDS,
    ) -> agent_pb2.Registration:
        """Wait until the registration satisfies a condition."""
        deadline = time.monotonic() + seconds
        while True:
            registration = self.health().registration
            if condition(registration):
                return registration
            assert time.monotonic() < deadline, f"{registration}\n{self.log.read_text()}"
            time.sleep(0.05)

    def descendants(self) -> list[int]:
        """Every process below the agent."""
        below: list[int] = []
        waiting = [self.process.pid]
        while waiting:
            with contextlib.suppress(OSError):
                parent = waiting.pop()
                children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
                below += map(int, children)
                waiting += map(int, children)
        return below

    def wait(self, seconds: float = 30.0) -> int:
        return self.process.wait(seconds)


@dataclass
class Agents:
    """Starts agents that find each other."""

    folder: Path
    network: str
    running: list[AgentProcess] = field(default_factory=list)

    def start(
        self,
        name: str,
        role: str,
        *options: str,
        engine_args: tuple[str, ...] = (),
        timing: dict[str, float] = IMPATIENT,
    ) -> AgentProcess:
        address = f"{self.network}.{len(self.running) + 1}"
        known = self.folder / "agents"
        with known.open("a") as file:
            file.write(f"{address}:9000\n")
        log = self.folder / f"{name}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [
                    sys.executable, "-c", RUN, json.dumps(timing),
                    "--name", name, "--deployment", "d", "--revision", "r1", "--role", role,
                    "--host", address, "--peers", f"file:{known}", *options, "--", *engine_args,
                ],
                stdout=output,
                stderr=output,
            )  # fmt: skip
        agent = AgentProcess(name, f"{address}:9000", process, log)
        self.running.append(agent)
        return agent

    def end(self) -> None:
        for agent in self.running:
            agent.channel.close()
            # The subreaper ends the engine when its agent is killed.
            agent.process.kill()
            agent.process.wait(30)


@pytest.fixture
def agents(tmp_path: Path, host: str) -> Iterator[Agents]:
    """Agent processes, all ended afterwards."""
    group = Agents(tmp_path, host.rpartition(".")[0])
    yield group
    group.end()


@pytest.fixture
def is_alive() -> Callable[[int], bool]:
    """Whether a process runs (one that waits to be reaped does not)."""

    def alive(pid: int) -> bool:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state not in "ZX"

    return alive


@pytest.fixture
def all_gone(is_alive: Callable[[int], bool]) -> Callable[..., None]:
    """Assert that processes end within a bounded time."""

    def gone(pids: list[int], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while left := [pid for pid in pids if is_alive(pid)]:
            if time.monotonic() > deadline:
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                pytest.fail(f"processes {left} outlived their agent")
            time.sleep(0.02)

    return gone
