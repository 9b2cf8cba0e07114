"""A gateway of four processes, one of which is killed while all serve."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field

import aiohttp
import psutil
import pytest

from e2e.support.deployments import Deployment, deployed, emulated, idle, until
from tests.support.ports import find_free_port

PROCESSES = 4
STREAMS = 32
TOKENS = 400

pytestmark = pytest.mark.timeout(600)


@dataclass
class Gateway:
    """The one under test, beside the deployment's own."""

    process: subprocess.Popen[str]
    port: int
    internal_port: int
    lines: list[str] = field(default_factory=list)

    @property
    def children(self) -> list[psutil.Process]:
        found = psutil.Process(self.process.pid).children()
        return [each for each in found if each.status() != psutil.STATUS_ZOMBIE]

    def read(self, page: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.internal_port}/{page}") as answer:
            return answer.read().decode()

    def count(self, name: str) -> float:
        values = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", self.read("metrics"), re.MULTILINE)
        return sum(map(float, values))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployed(
        emulated("four", 2, 2, time_scale=0.5), tmp_path_factory.mktemp("four"), 120
    ) as deployment:
        yield deployment


@pytest.fixture
def gateway(fleet: Deployment) -> Iterator[Gateway]:
    with started(fleet) as process:
        gateway = Gateway(process, *ports(process))
        reader = threading.Thread(target=read_lines, args=(gateway,))
        reader.start()
        until(lambda: any("listening on" in line for line in gateway.lines), 60, "it listens")
        yield gateway
        process.kill()
        process.wait()
        reader.join()


def started(fleet: Deployment) -> subprocess.Popen[str]:
    (agents,) = fleet.state_dir.rglob("agents")
    options = ["--processes", str(PROCESSES), "--agents", f"file:{agents}"]
    options += ["--port", str(find_free_port()), "--internal-port", str(find_free_port())]
    return subprocess.Popen(
        [sys.executable, "-m", "cleave.gateway.main", *options],
        env=os.environ | fleet.agent_env,
        stderr=subprocess.PIPE,
        text=True,
    )


def ports(process: subprocess.Popen[str]) -> tuple[int, int]:
    options = list(map(str, process.args))
    return tuple(int(options[options.index(f"--{name}") + 1]) for name in ("port", "internal-port"))


def read_lines(gateway: Gateway) -> None:
    for line in gateway.process.stderr:
        gateway.lines.append(line)


async def stream(
    session: aiohttp.ClientSession, gateway: Gateway, number: int, max_tokens: int = TOKENS
) -> int | None:
    """Tokens that came; None: the connection broke."""
    body = {
        "model": "four",
        "prompt": [number] * 100,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    url = f"http://127.0.0.1:{gateway.port}/v1/completions"
    try:
        async with session.post(url, json=body) as response:
            assert response.status == 200, await response.text()
            raw = await response.read()
    except aiohttp.ClientError:
        return None
    *events, done, rest = [e for e in raw.split(b"\n\n") if not e.startswith(b":")]
    assert (done, rest) == (b"data: [DONE]", b"")
    return sum(bool(json.loads(e.removeprefix(b"data: "))["choices"]) for e in events)


def find_connections(gateway: Gateway, process: psutil.Process) -> int:
    """Clients of one of the processes."""
    return sum(
        connection.laddr.port == gateway.port and connection.status == psutil.CONN_ESTABLISHED
        for connection in process.net_connections("tcp")
    )


def test_only_connections_of_the_killed_process_break_and_it_comes_back(
    gateway: Gateway, fleet: Deployment
) -> None:
    before = {child.pid for child in gateway.children}
    assert len(before) == PROCESSES
    name = "cleave_gateway_requests_total"
    tokens = 1_500  # All streams must still run when the process is killed.

    async def load() -> tuple[list[int | None], int]:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            streams = [
                asyncio.create_task(stream(session, gateway, number, tokens))
                for number in range(STREAMS)
            ]
            for _ in range(600):
                if await asyncio.to_thread(gateway.count, IN_FLIGHT) >= STREAMS:
                    break
                await asyncio.sleep(0.05)
            victim = max(gateway.children, key=lambda child: find_connections(gateway, child))
            own = find_connections(gateway, victim)
            count = await asyncio.to_thread(gateway.count, name)
            victim.send_signal(signal.SIGKILL)
            found = await asyncio.gather(*streams)
            assert await asyncio.to_thread(gateway.count, name) >= count
            return found, own

    found, own = asyncio.run(load())
    assert 0 < own < STREAMS
    assert found.count(None) == own
    assert [each for each in found if each is not None] == [tokens] * (STREAMS - own)
    until(lambda: len(gateway.children) == PROCESSES, 60, "another one is there")
    until(lambda: gateway.count("cleave_gateway_processes") == PROCESSES, 60, "it serves")
    assert len({child.pid for child in gateway.children} & before) == PROCESSES - 1
    assert gateway.count("cleave_gateway_process_restarts_total") == 1
    assert json.loads(gateway.read("health"))["status"] == "ok"
    until(lambda: idle(fleet), 60, "all KV is freed")
    until(lambda: is_forgotten(gateway), 60, "its load has left the books")
    assert asyncio.run(ask_all(gateway, 40)) == [TOKENS] * 40


IN_FLIGHT = "cleave_gateway_requests_in_flight"


def is_forgotten(gateway: Gateway) -> bool:
    page = json.loads(gateway.read("fleet"))
    return all(
        each["requests_in_flight"] == each["pending_tokens"] == 0 for each in page["instances"]
    )


async def ask_all(gateway: Gateway, count: int) -> list[int | None]:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        return await asyncio.gather(*(stream(session, gateway, n) for n in range(count)))


def test_on_sigterm_all_finish_what_they_serve(gateway: Gateway) -> None:
    async def load() -> list[int | None]:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            streams = [asyncio.create_task(stream(session, gateway, n)) for n in range(STREAMS)]
            for _ in range(600):
                if await asyncio.to_thread(gateway.count, IN_FLIGHT) >= STREAMS:
                    break
                await asyncio.sleep(0.05)
            gateway.process.send_signal(signal.SIGTERM)
            return await asyncio.gather(*streams)

    children = gateway.children
    assert asyncio.run(load()) == [TOKENS] * STREAMS
    assert gateway.process.wait(60) == 0
    assert not any(child.is_running() for child in children)


def test_children_do_not_outlive_a_killed_parent(gateway: Gateway) -> None:
    children = gateway.children
    os.kill(gateway.process.pid, signal.SIGKILL)
    gateway.process.wait(10)
    until(lambda: not any(child.is_running() for child in children), 30, "all have ended")
