"""Following real gRPC agents on loopback."""

import asyncio
import contextlib
import logging
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest

from cleave.router import agent_watcher
from cleave.router.agent_watcher import AgentWatcher
from cleave.router.instance import Connectivity
from cleave.router.registry import InstanceRegistry
from cleave.rpc import event_budget
from cleave.rpc.agent_discovery import AgentDiscovery, DiscoveryError
from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc


class FakeAgent(agent_pb2_grpc.AgentServicer):
    """Sends its registration, then reports until silenced."""

    def __init__(self, registration: agent_pb2.WatchEvent) -> None:
        self.registration = registration
        self.silent = False
        self.routers: set[str] = set()
        self.port = 0
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int = 0) -> None:
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        agent_pb2_grpc.add_AgentServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0)

    async def Watch(self, request, context):  # noqa: N802
        declared = None
        self.routers.add(request.router)
        while True:
            if self.registration is not declared:
                declared = self.registration
                yield declared
            if not self.silent:
                boot_id = declared.registration.boot_id
                yield agent_pb2.WatchEvent(load=agent_pb2.LoadReport(boot_id=boot_id))
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def watching(source: str, registry: InstanceRegistry) -> AsyncIterator[AgentWatcher]:
    watcher = AgentWatcher(AgentDiscovery(source), registry, time.monotonic)
    await watcher.start()
    try:
        yield watcher
    finally:
        await watcher.stop()


async def until(condition: Callable[[], bool], what: str) -> None:
    for _ in range(300):
        if condition():
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"not within 15 s: {what}")


def is_open(registry: InstanceRegistry, name: str) -> bool:
    return name in registry.instances and registry.instances[name].selectable


async def test_a_source_without_agents_is_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    missing = f"file:{tmp_path / 'agents'}"
    async with watching(missing, InstanceRegistry()):
        assert f"no agents in {missing!r} yet" in caplog.text
    caplog.clear()
    async with watching("127.0.0.1:1", InstanceRegistry()):
        assert "no agents" not in caplog.text


async def test_agents_are_followed_as_they_come_and_go(tmp_path, registry, make_event) -> None:
    one, two = FakeAgent(make_event("p", "prefill")), FakeAgent(make_event("d", "decode"))
    await one.start()
    await two.start()
    agents = tmp_path / "agents"
    agents.write_text(f"127.0.0.1:{one.port}\n")
    async with watching(f"file:{agents}", registry):
        await until(lambda: is_open(registry, "p"), "the first agent is followed")
        agents.write_text(f"127.0.0.1:{one.port}\n127.0.0.1:{two.port}\n")
        await until(lambda: is_open(registry, "d"), "the second agent is followed")
        agents.write_text(f"127.0.0.1:{two.port}\n")
        await asyncio.sleep(0.7)
        assert is_open(registry, "p"), "an address that is gone but still talks is kept"
        await one.stop()
        await until(lambda: "p" not in registry.instances, "it is forgotten once it is silent")
        assert is_open(registry, "d")
    await two.stop()


async def test_a_start_waits_for_agents_that_are_there_and_not_for_others(
    registry, make_event
) -> None:
    agents = [FakeAgent(make_event(name, "mixed")) for name in ("one", "two", "gone")]
    for agent in agents:
        await agent.start()
    await agents[2].stop()
    source = ",".join(f"127.0.0.1:{agent.port}" for agent in agents)
    async with watching(source, registry):
        assert is_open(registry, "one")
        assert is_open(registry, "two")
    for agent in agents[:2]:
        await agent.stop()


async def test_a_start_does_not_wait_long_for_an_agent_that_says_nothing(
    registry, monkeypatch
) -> None:
    monkeypatch.setattr(agent_watcher, "REGISTRATION_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        async with watching(f"127.0.0.1:{mute.getsockname()[1]}", registry):
            assert not registry.instances


async def test_an_agent_that_dies_is_suspended_and_followed_again(registry, make_event) -> None:
    agent = FakeAgent(make_event("d", "decode"))
    await agent.start()
    async with watching(f"127.0.0.1:{agent.port}", registry):
        await until(lambda: is_open(registry, "d"), "followed")
        await agent.stop()
        await until(lambda: not is_open(registry, "d"), "suspended")
        assert "d" in registry.instances
        again = FakeAgent(make_event("d", "decode", boot_id="second"))
        await again.start(agent.port)
        await until(lambda: is_open(registry, "d"), "open again")
        assert registry.instances["d"].target.boot_id == "second"
    await again.stop()


async def test_a_silent_agent_is_doubted_until_it_speaks(registry, make_event) -> None:
    agent = FakeAgent(make_event("d", "decode"))
    await agent.start()
    async with watching(f"127.0.0.1:{agent.port}", registry):
        await until(lambda: is_open(registry, "d"), "followed")
        agent.silent = True
        instance = registry.instances["d"]
        await until(lambda: instance.connectivity is Connectivity.STALE, "in doubt")
        assert instance.selectable
        agent.silent = False
        await until(lambda: instance.connectivity is Connectivity.FRESH, "heard again")
    await agent.stop()


async def test_a_new_registration_replaces_the_old_one(registry, make_event) -> None:
    agent = FakeAgent(make_event("d", "decode"))
    await agent.start()
    async with watching(f"127.0.0.1:{agent.port}", registry):
        await until(lambda: is_open(registry, "d"), "followed")
        agent.registration = make_event("d", "decode", state=agent_pb2.STATE_DRAINING)
        await until(lambda: not is_open(registry, "d"), "closed")
    await agent.stop()


@pytest.mark.parametrize(
    "fields", [{"engine_url": "http://127.0.0.2:80"}, {"deployment": "another"}]
)
async def test_an_agent_that_reports_something_else_is_not_believed(
    registry, make_event, caplog, fields: dict
) -> None:
    agents = (
        FakeAgent(make_event("good", "decode")),
        FakeAgent(make_event("bad", "decode", **fields)),
    )
    for agent in agents:
        await agent.start()
    source = ",".join(f"127.0.0.1:{agent.port}" for agent in agents)
    discovery = AgentDiscovery(source)
    watcher = AgentWatcher(discovery, registry, time.monotonic, deployment="d")
    await watcher.start()
    await until(lambda: is_open(registry, "good"), "the other agent is followed")
    assert set(registry.instances) == {"good"}
    assert "sent an invalid event" in caplog.text
    await watcher.stop()
    for agent in agents:
        await agent.stop()


async def test_a_malformed_source_is_refused_at_once(registry) -> None:
    with pytest.raises(DiscoveryError):
        await AgentWatcher(AgentDiscovery("nowhere"), registry, time.monotonic).start()


async def test_every_fleet_follows_under_a_name_of_its_own(registry, make_event) -> None:
    agent = FakeAgent(make_event("d", "decode"))
    await agent.start()
    source = f"127.0.0.1:{agent.port}"
    async with watching(source, registry), watching(source, InstanceRegistry()):
        await until(lambda: len(agent.routers) == 2, "both are counted")
        assert "" not in agent.routers
    await agent.stop()


class RefusingAgent(FakeAgent):
    """Refuses calls until `accepts` is set."""

    accepts = False

    async def Watch(self, request, context):  # noqa: N802
        if not self.accepts:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is another one")
        async for event in super().Watch(request, context):
            yield event


async def test_a_refused_gateway_says_who_refuses_it_and_why_until_it_is_accepted(
    registry, make_event, caplog: pytest.LogCaptureFixture
) -> None:
    agent = RefusingAgent(make_event("p", "mixed"))
    await agent.start()
    async with watching(f"127.0.0.1:{agent.port}", registry):
        await until(lambda: registry.refusals, "the refusal is known")
        error = str(registry.build_error("m"))
        assert error.startswith("no instance has answered so far: 1 agents refuse this gateway")
        assert f"127.0.0.1:{agent.port} (the token is another one)" in error
        assert "restart the deployment" in error
        assert "refuses this gateway" in caplog.text
        agent.accepts = True
        await until(lambda: is_open(registry, "p"), "it is followed")
        assert registry.explain_refusals() == ""
    await agent.stop()


@pytest.mark.parametrize("kind", ["boot", "adapters", "load"])
async def test_an_agent_that_sends_without_pause_takes_little_of_a_core(
    registry, make_event, monkeypatch, kind: str
) -> None:
    monkeypatch.setattr(event_budget, "_SAVED_S", 0.02)
    for number in range(256):
        registry.on_event(f"a{number}", make_event(f"i{number}", "decode"), time.monotonic())
    command = (sys.executable, "-m", "tests.support.flooding_agent", kind)
    flood = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    try:
        port = int(await flood.stdout.readline())
        async with watching(f"127.0.0.1:{port}", registry):
            await until(lambda: "flood" in registry.instances, "it is followed")
            await asyncio.sleep(0.5)
            began, began_at = time.process_time(), time.monotonic()
            await asyncio.sleep(1.5)
            share = (time.process_time() - began) / (time.monotonic() - began_at)
    finally:
        flood.kill()
        await flood.wait()
    # 0.03 on an idle machine; without a budget it is 0.4 and more.
    assert share < 0.2


async def test_an_agent_that_ends_its_stream_at_once_is_called_ever_less_often(
    registry, make_event, monkeypatch
) -> None:
    class EndingAgent(FakeAgent):
        calls = 0

        async def Watch(self, request, context):  # noqa: N802
            self.calls += 1
            yield self.registration

    monkeypatch.setattr(agent_watcher, "MIN_DELAY_S", 0.2)
    agent = EndingAgent(make_event("d", "decode"))
    await agent.start()
    async with watching(f"127.0.0.1:{agent.port}", registry):
        await asyncio.sleep(3)
    await agent.stop()
    assert 2 <= agent.calls <= 7
