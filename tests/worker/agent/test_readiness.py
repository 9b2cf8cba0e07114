"""From an engine that answers to ready: who is looked for, what each outcome leads to."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cleave.policy.kv_transfer_sample import TransferSample
from cleave.rpc.pull_counters import PullCounters
from cleave.rpc.v1 import agent_pb2
from cleave.shm.load_page import LoadPage
from cleave_worker.agent import readiness
from cleave_worker.agent.config import AgentConfig
from cleave_worker.agent.instance import (
    EnginePages,
    KvDirection,
    ServedEngineInfo,
    WorkerInstance,
    get_kv_direction,
)
from cleave_worker.agent.kv_self_test import KvTestError, MissingCountersError
from cleave_worker.agent.peers import PeerScan, is_counterpart
from cleave_worker.agent.readiness import verify_kv_path, verify_role, verify_with_peers
from cleave_worker.agent.supervisor import keep_verified

from tests.support.doubles import Answering

PROVEN = agent_pb2.KvPath(verified=True, transport="emulated")
PEER = PeerScan(peer=agent_pb2.Registration(instance="w-1"))
Script = Callable[[], object]


@pytest.fixture
def instance(config: AgentConfig) -> WorkerInstance:
    unproven = WorkerInstance(config)
    unproven.set_engine_info(ServedEngineInfo("emulated", 2048, 16))
    return unproven


class Scene:
    """Scripted peers and test results; records what the instance registered at each call."""

    def __init__(
        self, instance: WorkerInstance, sights: list[PeerScan], results: list[str]
    ) -> None:
        self.instance = instance
        self.sights = sights
        self.results = results
        self.states: list[tuple[int, str]] = []
        self.tested: list[KvDirection] = []
        self.other_way = ""
        """Why hand-offs the other way fail."""

    async def look(self) -> PeerScan:
        registration = self.instance.copy_registration()
        self.states.append((registration.state, registration.reason or registration.kv_path.detail))
        return self.sights.pop(0) if len(self.sights) > 1 else self.sights[0]

    async def test(self, peer: agent_pb2.Registration, flow: KvDirection) -> agent_pb2.KvPath:
        self.tested.append(flow)
        own_way = flow is get_kv_direction(self.instance.copy_registration().role)
        if wrong := self.results.pop(0) if own_way else self.other_way:
            raise KvTestError(wrong)
        return PROVEN


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cleave_worker.agent.readiness._FIRST_DELAY", 0.01)


async def test_a_passed_test_makes_the_worker_ready(
    config: AgentConfig, instance: WorkerInstance
) -> None:
    scene = Scene(instance, [PEER], [""])
    await verify_with_peers(config, instance, scene.look, scene.test)
    assert instance.state == agent_pb2.STATE_READY
    assert instance.copy_registration().kv_path.verified


@pytest.mark.parametrize("other_way", ["", "wrong tokens"])
async def test_the_other_way_is_tested_before_ready_and_not_needed_for_it(
    config: AgentConfig, instance: WorkerInstance, other_way: str
) -> None:
    scene = Scene(instance, [PEER], [""])
    scene.other_way = other_way
    await verify_with_peers(config, instance, scene.look, scene.test)
    assert scene.tested == [KvDirection.OUT, KvDirection.IN]
    assert instance.state == agent_pb2.STATE_READY
    assert instance.is_verified(KvDirection.IN) is not bool(other_way)
    instance.set_role(agent_pb2.ROLE_DECODE, 2)
    assert instance.copy_registration().kv_path.verified is not bool(other_way)
    instance.set_role(agent_pb2.ROLE_PREFILL, 3)
    assert instance.copy_registration().kv_path.verified


async def test_a_role_that_changes_during_a_test_is_tested_for_next(
    config: AgentConfig, instance: WorkerInstance
) -> None:
    scene = Scene(instance, [PEER], ["", ""])

    async def test(peer: agent_pb2.Registration, flow: KvDirection) -> agent_pb2.KvPath:
        if not scene.tested:
            instance.set_role(agent_pb2.ROLE_DECODE, 2)
            scene.tested.append(flow)
            return PROVEN
        if len(scene.tested) == 1:
            scene.tested.append(flow)
            raise KvTestError("wrong tokens")
        return await scene.test(peer, flow)

    await verify_with_peers(config, instance, scene.look, test)
    assert scene.tested[2] is KvDirection.IN
    assert instance.copy_registration().kv_path.verified


async def test_the_kv_path_of_a_role_is_tested_before_a_flip_unless_proven(
    config: AgentConfig, instance: WorkerInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(instance, [PEER], [])
    monkeypatch.setattr("cleave_worker.agent.readiness._build_scan", lambda *_: scene.look)
    monkeypatch.setattr("cleave_worker.agent.readiness._build_test", lambda *_: scene.test)
    known = replace(config, peers="static:")
    # Not ready yet: the test that leads there will go the new way.
    await verify_role(known, instance, agent_pb2.ROLE_DECODE)
    instance.mark_verified(PROVEN, KvDirection.OUT)
    scene.other_way = "wrong tokens"
    with pytest.raises(KvTestError):
        await verify_role(known, instance, agent_pb2.ROLE_MIXED)
    assert scene.tested == [KvDirection.IN]
    scene.other_way = ""
    for role in (agent_pb2.ROLE_MIXED, agent_pb2.ROLE_DECODE, agent_pb2.ROLE_PREFILL):
        await verify_role(known, instance, role)
    assert scene.tested == [KvDirection.IN, KvDirection.IN]
    assert instance.is_verified(KvDirection.IN)


async def test_a_role_is_accepted_where_engines_count_no_bytes(
    config: AgentConfig, instance: WorkerInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(instance, [PEER], [])

    async def test(_: agent_pb2.Registration, __: KvDirection) -> agent_pb2.KvPath:
        raise MissingCountersError("w-1 counts no bytes of KV")

    monkeypatch.setattr("cleave_worker.agent.readiness._build_scan", lambda *_: scene.look)
    monkeypatch.setattr("cleave_worker.agent.readiness._build_test", lambda *_: test)
    instance.mark_unverified("w-1 counts no bytes of KV")
    await verify_role(replace(config, peers="static:"), instance, agent_pb2.ROLE_DECODE)
    assert not instance.is_verified(KvDirection.IN)


OK = b"HTTP/1.1 200 OK\r\n\r\n"
METRICS = b"vllm:nixl_bytes_transferred_sum 1\n"
HANDED = b'{"kv_transfer_params": {"remote_engine_id": "b1"}%s}'


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(
    ("page", "peer"),
    [
        (METRICS, "http://[::"),
        (METRICS, "http://h:99999999"),
        (METRICS, b"not JSON"),
        (METRICS, b"[]"),
        (METRICS, HANDED % b""),
        (METRICS, HANDED % b', "usage": {"prompt_tokens": 0}'),
        (METRICS, HANDED.replace(b"b1", b"\\ud800") % b""),
        (b"vllm:nixl_bytes_transferred_sum many\n", b""),
    ],
)
async def test_no_answer_of_an_engine_ends_the_agent(
    config: AgentConfig,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    page: bytes,
    peer: str | bytes,
) -> None:
    known = replace(config, role=agent_pb2.ROLE_DECODE, peers="static:")
    instance = WorkerInstance(known)
    async with Answering() as serve:
        with LoadPage(tmp_path / "load") as load:
            instance.start_boot("b0", await serve(OK, page), EnginePages(load))
            instance.set_engine_info(ServedEngineInfo("emulated", 2048, 16))
            url = peer if isinstance(peer, str) else await serve(OK, peer)
            seen = PeerScan(
                peer=agent_pb2.Registration(instance="w-1", boot_id="b1", engine_url=url)
            )
            scene = Scene(instance, [seen], [])
            monkeypatch.setattr("cleave_worker.agent.readiness._build_scan", lambda *_: scene.look)
            proving = asyncio.create_task(keep_verified(known, instance))
            async with asyncio.timeout(20):
                while not instance.copy_registration().reason.startswith(
                    "KV test with w-1 failed: "
                ):
                    await instance.wait_for_change(1.0)
                    assert not proving.done(), proving.exception()
            proving.cancel()
    assert instance.state == agent_pb2.STATE_VERIFYING


async def test_without_a_source_of_peers_a_role_needs_no_test(
    config: AgentConfig, instance: WorkerInstance
) -> None:
    await verify_kv_path(config, instance)
    await verify_role(config, instance, agent_pb2.ROLE_DECODE)
    assert not instance.is_verified(KvDirection.IN)


@pytest.mark.usefixtures("fast")
async def test_a_failed_test_is_reported_and_retried(
    config: AgentConfig, instance: WorkerInstance
) -> None:
    scene = Scene(instance, [PEER], ["wrong tokens", ""])
    await verify_with_peers(config, instance, scene.look, scene.test)
    state, reason = scene.states[1]
    assert state == agent_pb2.STATE_VERIFYING
    assert reason == "KV test with w-1 failed: wrong tokens"
    assert instance.copy_registration().kv_path.verified


async def test_with_a_peer_that_counts_no_bytes_a_worker_is_ready_unverified_and_says_why(
    config: AgentConfig, instance: WorkerInstance
) -> None:
    scene = Scene(instance, [PEER], [])

    async def test(_: agent_pb2.Registration, __: KvDirection) -> agent_pb2.KvPath:
        raise MissingCountersError("w-1 counts no bytes of KV")

    searching = asyncio.create_task(verify_with_peers(config, instance, scene.look, test))
    async with asyncio.timeout(20):
        while instance.state != agent_pb2.STATE_READY:
            await instance.wait_for_change()
    searching.cancel()
    kv_path = instance.copy_registration().kv_path
    assert (kv_path.verified, kv_path.detail) == (False, "w-1 counts no bytes of KV")


async def test_without_peers_a_worker_is_ready_unverified_and_goes_on_looking(
    config: AgentConfig, instance: WorkerInstance
) -> None:
    scene = Scene(instance, [PeerScan()], [""])
    searching = asyncio.create_task(verify_with_peers(config, instance, scene.look, scene.test))
    async with asyncio.timeout(20):
        while instance.state != agent_pb2.STATE_READY:
            await instance.wait_for_change()
    assert not instance.copy_registration().kv_path.verified
    assert instance.copy_registration().kv_path.detail == "no peer yet"
    scene.sights[:] = [PEER]
    await asyncio.wait_for(searching, 20)
    assert instance.copy_registration().kv_path.verified


async def test_a_peer_that_still_starts_is_waited_for(
    config: AgentConfig, instance: WorkerInstance
) -> None:
    patient = replace(config, timing=replace(config.timing, peer_wait=0.02, peer_poll=0.01))
    scene = Scene(instance, [PeerScan(has_starting=True)] * 10 + [PEER], [""])
    await verify_with_peers(patient, instance, scene.look, scene.test)
    assert {state for state, _ in scene.states} == {agent_pb2.STATE_VERIFYING}


async def test_a_peer_that_starts_for_ever_is_not_waited_for_for_ever(
    config: AgentConfig, instance: WorkerInstance
) -> None:
    hasty = replace(config.timing, peer_wait=0.02, start_timeout=0.05)
    scene = Scene(instance, [PeerScan(has_starting=True)] * 10 + [PeerScan(has_starting=True)], [])
    searching = asyncio.create_task(
        verify_with_peers(replace(config, timing=hasty), instance, scene.look, scene.test)
    )
    async with asyncio.timeout(20):
        while instance.state != agent_pb2.STATE_READY:
            await instance.wait_for_change()
    searching.cancel()


@pytest.mark.parametrize("scan", [PeerScan(), PeerScan(has_starting=True)])
async def test_a_mixed_instance_waits_for_no_peer_and_is_tested_with_one_later(
    config: AgentConfig, scan: PeerScan
) -> None:
    timing = replace(config.timing, peer_wait=600.0, start_timeout=600.0, peer_search=0.01)
    mixed = replace(config, role=agent_pb2.ROLE_MIXED, timing=timing)
    instance = WorkerInstance(mixed)
    instance.set_engine_info(ServedEngineInfo("emulated", 2048, 16))
    scene = Scene(instance, [scan, scan, PEER], [""])
    await asyncio.wait_for(verify_with_peers(mixed, instance, scene.look, scene.test), 20)
    verifying, ready = agent_pb2.STATE_VERIFYING, agent_pb2.STATE_READY
    assert [state for state, _ in scene.states] == [verifying, ready, ready]
    assert instance.copy_registration().kv_path.verified


async def test_without_a_source_of_peers_nothing_is_waited_for(
    config: AgentConfig, instance: WorkerInstance
) -> None:
    await verify_kv_path(config, instance)
    assert instance.state == agent_pb2.STATE_READY
    assert not instance.copy_registration().kv_path.verified


def worker(name: str, role: int, **values: str) -> agent_pb2.Registration:
    fields = {"deployment": "d", "revision": "r1", "model": "m", **values}
    return agent_pb2.Registration(instance=name, role=role, **fields)


P, D, M = agent_pb2.ROLE_PREFILL, agent_pb2.ROLE_DECODE, agent_pb2.ROLE_MIXED


@pytest.mark.parametrize(
    ("own", "suiting", "flow"),
    [(P, {D, M}, KvDirection.OUT), (D, {P, M}, KvDirection.IN), (M, {P, D, M}, KvDirection.IN)],
)
def test_a_test_goes_the_way_that_requests_will_go(
    own: int, suiting: set[int], flow: KvDirection
) -> None:
    assert {
        role for role in (P, D, M) if is_counterpart(worker("a", own), worker("b", role))
    } == suiting
    assert get_kv_direction(own) is flow


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
    assert not is_counterpart(worker("a", P), other)


async def test_the_duration_of_a_pull_is_that_of_each_rank_of_the_decode_engine(
    config: AgentConfig, instance: WorkerInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def verify_transfer(*_: object, **__: object) -> TransferSample:
        before, after = PullCounters(0, 0.5, 0, 0), PullCounters(4e9, 0.9, 2000, 0)
        return TransferSample(2000, 125, 50.0, 60.0, before, after)

    monkeypatch.setattr(readiness.kv_self_test, "verify_transfer", verify_transfer)
    test = readiness._build_test(config, instance)
    peer = agent_pb2.Registration(instance="w-1", tensor_parallel_size=4, pipeline_parallel_size=2)
    path = await test(peer, KvDirection.OUT)
    assert (path.pull_ms, path.token_ms) == pytest.approx((50, 0.025))
    assert (await test(peer, KvDirection.IN)).pull_ms == pytest.approx(400)
