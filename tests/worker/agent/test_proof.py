"""From an engine that answers to ready: who is looked for, what each outcome leads to."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from cleave.rpc.v1 import agent_pb2
from cleave_worker.agent.config import AgentConfig
from cleave_worker.agent.instance import EngineFacts, Instance
from cleave_worker.agent.peers import Sight, suits
from cleave_worker.agent.proof import direction, prove, pursue
from cleave_worker.agent.verify import TransferError

PROVEN = agent_pb2.KvPath(verified=True, transport="emulated")
PEER = Sight(peer=agent_pb2.Registration(instance="w-1"))
Script = Callable[[], object]


@pytest.fixture
def instance(config: AgentConfig) -> Instance:
    told = Instance(config)
    told.answered(EngineFacts("emulated", 2048, 16))
    return told


class Scene:
    """Scripted sights and test results; notes what the instance said each time it was asked."""

    def __init__(self, instance: Instance, sights: list[Sight], results: list[str]) -> None:
        self.instance = instance
        self.sights = sights
        self.results = results
        self.states: list[tuple[int, str]] = []

    async def look(self) -> Sight:
        told = self.instance.registration()
        self.states.append((told.state, told.reason or told.kv_path.detail))
        return self.sights.pop(0) if len(self.sights) > 1 else self.sights[0]

    async def test(self, peer: agent_pb2.Registration) -> agent_pb2.KvPath:
        if wrong := self.results.pop(0):
            raise TransferError(wrong)
        return PROVEN


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cleave_worker.agent.proof._FIRST_DELAY", 0.01)


async def test_a_passed_test_makes_the_worker_ready(
    config: AgentConfig, instance: Instance
) -> None:
    scene = Scene(instance, [PEER], [""])
    await pursue(config, instance, scene.look, scene.test)
    assert instance.state == agent_pb2.STATE_READY
    assert instance.registration().kv_path.verified


@pytest.mark.usefixtures("fast")
async def test_a_failed_test_is_told_and_tried_again(
    config: AgentConfig, instance: Instance
) -> None:
    scene = Scene(instance, [PEER], ["wrong tokens", ""])
    await pursue(config, instance, scene.look, scene.test)
    state, reason = scene.states[1]
    assert state == agent_pb2.STATE_VERIFYING
    assert reason == "KV test with w-1 failed: wrong tokens"
    assert instance.registration().kv_path.verified


async def test_with_nobody_in_sight_a_worker_is_ready_unverified_and_goes_on_looking(
    config: AgentConfig, instance: Instance
) -> None:
    scene = Scene(instance, [Sight()], [""])
    searching = asyncio.create_task(pursue(config, instance, scene.look, scene.test))
    async with asyncio.timeout(20):
        while instance.state != agent_pb2.STATE_READY:
            await instance.change()
    assert not instance.registration().kv_path.verified
    assert instance.registration().kv_path.detail == "no peer yet"
    scene.sights[:] = [PEER]
    await asyncio.wait_for(searching, 20)
    assert instance.registration().kv_path.verified


async def test_a_peer_that_still_starts_is_waited_for(
    config: AgentConfig, instance: Instance
) -> None:
    patient = replace(config, timing=replace(config.timing, peer_wait=0.02, peer_poll=0.01))
    scene = Scene(instance, [Sight(starting=True)] * 10 + [PEER], [""])
    await pursue(patient, instance, scene.look, scene.test)
    assert {state for state, _ in scene.states} == {agent_pb2.STATE_VERIFYING}


async def test_a_peer_that_starts_for_ever_is_not_waited_for_for_ever(
    config: AgentConfig, instance: Instance
) -> None:
    hasty = replace(config.timing, peer_wait=0.02, start_timeout=0.05)
    scene = Scene(instance, [Sight(starting=True)] * 10 + [Sight(starting=True)], [])
    searching = asyncio.create_task(
        pursue(replace(config, timing=hasty), instance, scene.look, scene.test)
    )
    async with asyncio.timeout(20):
        while instance.state != agent_pb2.STATE_READY:
            await instance.change()
    searching.cancel()


async def test_without_a_source_of_peers_nothing_is_waited_for(
    config: AgentConfig, instance: Instance
) -> None:
    await prove(config, instance)
    assert instance.state == agent_pb2.STATE_READY
    assert not instance.registration().kv_path.verified


def worker(name: str, role: int, **values: str) -> agent_pb2.Registration:
    told = {"deployment": "d", "revision": "r1", "model": "m", **values}
    return agent_pb2.Registration(instance=name, role=role, **told)


P, D, M = agent_pb2.ROLE_PREFILL, agent_pb2.ROLE_DECODE, agent_pb2.ROLE_MIXED


@pytest.mark.parametrize(
    ("own", "peer", "expected"),
    [
        (P, D, "own to peer"),
        (P, M, "own to peer"),
        (D, P, "peer to own"),
        (D, M, "peer to own"),
        (M, P, "peer to own"),
        (M, D, "own to peer"),
        (M, M, "own to peer"),
        (P, P, None),
        (D, D, None),
    ],
)
def test_a_test_goes_the_way_that_requests_will_go(
    own: int, peer: int, expected: str | None
) -> None:
    a, b = worker("a", own), worker("b", peer)
    assert suits(a, b) == (expected is not None)
    if expected:
        assert direction(a, b) == ((a, b) if expected == "own to peer" else (b, a))


@pytest.mark.parametrize(
    "other",
    [
        worker("a", D),
        worker("b", D, revision="r2"),
        worker("b", D, deployment="e"),
        worker("b", D, model="n"),
    ],
)
def test_itself_and_workers_of_another_kind_are_no_peers(other: agent_pb2.Registration) -> None:
    assert not suits(worker("a", P), other)
