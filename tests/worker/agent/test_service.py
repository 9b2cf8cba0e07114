"""The agent's gRPC service on a real channel."""

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc
from cleave.shm.load_page import LoadPage
from cleave_worker.agent import service
from cleave_worker.agent.config import AgentConfig
from cleave_worker.agent.drain import DrainResult
from cleave_worker.agent.instance import EnginePages, ServedEngineInfo, WorkerInstance
from cleave_worker.agent.kv_self_test import KvTestError
from cleave_worker.agent.service import AgentServer

SECONDS = 20


class Served:
    """One instance behind its server, and a channel to it."""

    def __init__(self, config: AgentConfig, address: str) -> None:
        self.instance = WorkerInstance(config)
        self.drains: list[float | None] = []
        self.broken = ""
        """Why no KV path can be proven."""
        self.proven: list[int] = []
        self.server = AgentServer(self.instance, self._drain, self._prove, address)
        self.channel = grpc.aio.insecure_channel(address)
        self.stub = agent_pb2_grpc.AgentStub(self.channel)

    async def _drain(self, seconds: float | None) -> DrainResult:
        self.drains.append(seconds)
        return DrainResult(is_empty=False, num_remaining=4)

    async def _prove(self, role: int) -> None:
        if self.broken:
            raise KvTestError(self.broken)
        self.proven.append(role)

    async def probe(self, service: str) -> int:
        answer = await health_pb2_grpc.HealthStub(self.channel).Check(
            health_pb2.HealthCheckRequest(service=service), timeout=SECONDS
        )
        return answer.status

    async def wait_for_probe(self, service: str, status: int) -> None:
        async with asyncio.timeout(SECONDS):
            while True:
                if await self.probe(service) == status:
                    return
                await asyncio.sleep(0.01)

    async def code_of_set_role(self, **order: object) -> grpc.StatusCode:
        try:
            await self.stub.SetRole(agent_pb2.SetRoleRequest(**order), timeout=SECONDS)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK


@pytest.fixture
async def served(config: AgentConfig) -> AsyncIterator[Served]:
    both = Served(config, config.address)
    await both.server.start()
    yield both
    await both.channel.close()
    both.instance.end()
    await both.server.stop(0)


async def test_a_watch_begins_with_the_registration_and_goes_on_with_reports(
    served: Served,
) -> None:
    kinds = []
    async for event in served.stub.Watch(agent_pb2.WatchRequest(interval_ms=10), timeout=SECONDS):
        kinds.append(event.WhichOneof("event"))
        if len(kinds) == 4:
            break
    assert kinds == ["registration", "load", "load", "load"]


async def test_a_change_is_sent_without_waiting_for_the_next_report(served: Served) -> None:
    watch = served.stub.Watch(agent_pb2.WatchRequest(interval_ms=60_000), timeout=SECONDS)
    for _ in range(2):
        await watch.read()
    served.instance.drain()
    event = await watch.read()
    assert event.registration.state == agent_pb2.STATE_DRAINING


async def test_a_watch_ends_with_the_agent(served: Served) -> None:
    watch = served.stub.Watch(agent_pb2.WatchRequest(interval_ms=60_000), timeout=SECONDS)
    await watch.read()
    served.instance.end()
    async with asyncio.timeout(SECONDS):
        while await watch.read() is not grpc.aio.EOF:
            continue


async def test_only_a_ready_instance_passes_the_readiness_probe(served: Served) -> None:
    serving, not_serving = (
        health_pb2.HealthCheckResponse.SERVING,
        health_pb2.HealthCheckResponse.NOT_SERVING,
    )
    assert await served.probe("") == serving
    assert await served.probe("ready") == not_serving
    served.instance.set_engine_info(ServedEngineInfo("emulated", 2048, 16))
    served.instance.mark_unverified("no peer yet")
    await served.wait_for_probe("ready", serving)
    served.instance.drain()
    await served.wait_for_probe("ready", not_serving)
    assert await served.probe("") == serving


async def test_role_orders_are_refused_with_the_codes_of_the_contract(served: Served) -> None:
    decode = agent_pb2.ROLE_DECODE
    assert await served.code_of_set_role(epoch=5) == grpc.StatusCode.INVALID_ARGUMENT
    assert await served.code_of_set_role(role=decode, epoch=5) == grpc.StatusCode.OK
    stale = await served.code_of_set_role(role=decode, epoch=5)
    assert stale == grpc.StatusCode.FAILED_PRECONDITION
    other = await served.code_of_set_role(role=decode, epoch=6, boot_id="gone")
    assert other == grpc.StatusCode.ABORTED
    registration = (
        await served.stub.Health(agent_pb2.HealthRequest(), timeout=SECONDS)
    ).registration
    assert (registration.role, registration.epoch) == (decode, 5)


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ({"role": 2, "epoch": 2**64 - 1}, "epoch 18446744073709551615 is more than 1048576 beyond"),
        ({"role": 2, "epoch": 2**20 + 2}, "state 2"),
        ({"role": 9, "epoch": 2}, r"role 9 must be one of prefill \(1\), decode \(2\)"),
    ],
)
async def test_orders_that_no_order_could_follow_are_refused(
    served: Served, order: dict[str, int], reason: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=reason) as refused:
        await served.stub.SetRole(agent_pb2.SetRoleRequest(**order), timeout=SECONDS)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    registration = served.instance.copy_registration()
    assert (registration.role, registration.epoch) == (agent_pb2.ROLE_PREFILL, 1)
    assert await served.code_of_set_role(role=2, epoch=2**20 + 1) == grpc.StatusCode.OK


async def test_watchers_are_bounded_in_number_and_their_names_in_length(
    served: Served, monkeypatch
) -> None:
    monkeypatch.setattr(service, "_MAX_WATCHERS", 2)
    long = served.stub.Watch(agent_pb2.WatchRequest(router="r" * 65), timeout=SECONDS)
    with pytest.raises(grpc.aio.AioRpcError, match="router is a name of 65 characters, above 64"):
        await long.read()
    watches = [served.stub.Watch(agent_pb2.WatchRequest(), timeout=SECONDS) for _ in range(2)]
    for watch in watches:
        await watch.read()
    with pytest.raises(grpc.aio.AioRpcError, match="2 watchers are connected already"):
        await served.stub.Watch(agent_pb2.WatchRequest(), timeout=SECONDS).read()
    assert await served.stub.Health(agent_pb2.HealthRequest(), timeout=SECONDS)
    watches[0].cancel()
    async with asyncio.timeout(SECONDS):
        while not await is_watched(served):  # noqa: ASYNC110 - of another process, as it were
            await asyncio.sleep(0.01)


async def is_watched(served: Served) -> bool:
    """Whether one more watcher hears anything."""
    try:
        event = await served.stub.Watch(agent_pb2.WatchRequest(), timeout=SECONDS).read()
    except grpc.aio.AioRpcError:
        return False
    return event.HasField("registration")


async def test_no_watcher_gets_more_than_twenty_reports_a_second(served: Served) -> None:
    watch = served.stub.Watch(agent_pb2.WatchRequest(interval_ms=1, router=""), timeout=SECONDS)
    for _ in range(2):
        await watch.read()
    began = asyncio.get_running_loop().time()
    for _ in range(4):
        await watch.read()
    assert asyncio.get_running_loop().time() - began > 0.1


async def test_a_lasting_order_changes_the_home_and_another_one_does_not(served: Served) -> None:
    home = agent_pb2.ROLE_DECODE
    assert await served.code_of_set_role(role=home, epoch=5, lasting=True) == grpc.StatusCode.OK
    lent = agent_pb2.ROLE_MIXED
    assert await served.code_of_set_role(role=lent, epoch=6) == grpc.StatusCode.OK
    registration = (
        await served.stub.Health(agent_pb2.HealthRequest(), timeout=SECONDS)
    ).registration
    assert (registration.role, registration.home) == (lent, home)


async def test_a_role_whose_kv_path_cannot_be_proven_is_not_accepted(served: Served) -> None:
    served.broken = "wrong tokens"
    order = {"role": agent_pb2.ROLE_DECODE, "epoch": 5}
    assert await served.code_of_set_role(**order) == grpc.StatusCode.UNAVAILABLE
    registration = served.instance.copy_registration()
    assert (registration.role, registration.epoch) == (agent_pb2.ROLE_PREFILL, 1)
    served.broken = ""
    assert await served.code_of_set_role(**order) == grpc.StatusCode.OK
    # What is refused anyway needs no proof.
    assert await served.code_of_set_role(**order) == grpc.StatusCode.FAILED_PRECONDITION
    assert served.proven == [agent_pb2.ROLE_DECODE]


async def test_a_drain_call_reports_what_is_left(served: Served) -> None:
    drain = await served.stub.Drain(agent_pb2.DrainRequest(timeout_ms=1500), timeout=SECONDS)
    assert (drain.empty, drain.num_left) == (False, 4)
    await served.stub.Drain(agent_pb2.DrainRequest(), timeout=SECONDS)
    assert served.drains == [1.5, None]


async def test_an_occupied_port_is_refused(served: Served, config: AgentConfig) -> None:
    second = Served(config, config.address)
    with pytest.raises(OSError, match=str(config.port)):
        await second.server.start()
    await second.channel.close()


async def test_a_watcher_that_alone_sends_requests_gets_fewer_reports(served: Served) -> None:
    async def time_reports(call) -> list[float]:
        """Seconds from one to the next."""
        times = []
        while len(times) < 6:
            if (await call.read()).HasField("load"):
                times.append(asyncio.get_running_loop().time())
        return [later - earlier for earlier, later in pairwise(times)]

    def follow(router: str):
        request = agent_pb2.WatchRequest(interval_ms=40, router=router)
        return served.stub.Watch(request, timeout=SECONDS)

    alone = follow("a")
    assert sum(await time_reports(alone)) > 0.4
    stranger = follow("")
    assert min(await time_reports(stranger)) < 0.1
    second = follow("b")
    assert min(await time_reports(second)) < 0.1
    for call in (alone, stranger, second):
        call.cancel()


async def test_routers_learn_how_many_they_are_and_which(served: Served) -> None:
    def follow(router: str):
        return served.stub.Watch(agent_pb2.WatchRequest(interval_ms=10, router=router))

    async def until(call, counts: tuple[int, int]) -> None:
        async with asyncio.timeout(SECONDS):
            while True:
                load = (await call.read()).load
                if (load.num_routers, load.router_rank) == counts:
                    return

    first, other = follow("a"), follow("")
    await until(first, (1, 0))
    await until(other, (0, 0))
    second = follow("b")
    await until(second, (2, 1))
    await until(first, (2, 0))
    first.cancel()
    await until(second, (1, 0))
    second.cancel()
    other.cancel()


def prove(boot_id: str = "", prefill: str = "p", count: int = 1, age_ms: int = 0):
    proofs = agent_pb2.PairProofs(boot_id=boot_id)
    for number in range(count):
        proofs.proofs.add(
            prefill=prefill,
            prefill_boot_id=f"boot-{number}",
            trust=agent_pb2.TRUST_FAILED,
            age_ms=age_ms,
        )
    return proofs


async def test_results_of_pairs_reach_every_watcher_with_their_age(served: Served) -> None:
    watch = served.stub.Watch(agent_pb2.WatchRequest(interval_ms=60_000), timeout=SECONDS)
    for _ in range(2):
        await watch.read()
    await served.stub.RecordPairs(prove(age_ms=7_000), timeout=SECONDS)
    (proof,) = (await watch.read()).pairs.proofs
    assert (proof.prefill, proof.trust) == ("p", agent_pb2.TRUST_FAILED)
    assert 7_000 <= proof.age_ms < 7_000 + 1000 * SECONDS
    later = served.stub.Watch(agent_pb2.WatchRequest(interval_ms=60_000), timeout=SECONDS)
    events = [await later.read() for _ in range(2)]
    assert [each.WhichOneof("event") for each in events] == ["registration", "pairs"]


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        ({"age_ms": 0}, {"age_ms": 2_000}, 0),
        ({"age_ms": 2_000}, {"age_ms": 0}, 1),
        ({"source": "w", "sequence": 2}, {"source": "w", "sequence": 1}, 0),
        # The first one was on its way for a second.
        ({"source": "w", "sequence": 1}, {"source": "w", "sequence": 2, "age_ms": 1_000}, 1),
        ({"source": "w", "sequence": 2}, {"source": "v", "sequence": 1, "age_ms": 1_000}, 0),
        ({"source": "w", "sequence": 2}, {}, 1),
    ],
    ids=["older", "newer", "overtaken", "delayed", "of another gateway", "of an earlier version"],
)
async def test_an_older_result_of_a_pair_replaces_no_newer_one(
    served: Served, first: dict, second: dict, kept: int
) -> None:
    for number, fields in enumerate((first, second)):
        proof = agent_pb2.PairProof(prefill_boot_id="p", reason=str(number), **fields)
        served.instance.record_pairs("", [proof])
    assert [each.reason for each in served.instance.build_pair_proofs().proofs] == [str(kept)]


async def test_results_end_with_the_engine_that_they_are_about(
    served: Served, tmp_path: Path
) -> None:
    await served.stub.RecordPairs(prove(), timeout=SECONDS)
    with LoadPage(tmp_path / "load") as page:
        served.instance.start_boot("next", "http://127.0.0.1:1", EnginePages(page))
    assert not served.instance.build_pair_proofs().proofs
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await served.stub.RecordPairs(prove("before"), timeout=SECONDS)
    assert refused.value.code() is grpc.StatusCode.ABORTED


@pytest.mark.parametrize("proofs", [prove(count=257), prove(prefill="p" * 257)])
async def test_too_many_or_too_long_results_are_refused(served: Served, proofs) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="at most 256") as refused:
        await served.stub.RecordPairs(proofs, timeout=SECONDS)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_only_so_many_results_are_kept(served: Served) -> None:
    for start in range(0, 2_000, 250):
        served.instance.record_pairs(
            "", [agent_pb2.PairProof(prefill_boot_id=str(start + i)) for i in range(250)]
        )
    kept = [each.prefill_boot_id for each in served.instance.build_pair_proofs().proofs]
    assert kept == [str(number) for number in range(976, 2_000)]


async def test_an_order_of_adapters_is_taken_unless_it_is_wrong_or_old(served: Served) -> None:
    async def order(generation: int, *sources: str) -> grpc.StatusCode:
        adapters = [agent_pb2.AdapterSource(name="sql", source=each) for each in sources]
        request = agent_pb2.SetAdaptersRequest(adapters=adapters, generation=generation)
        try:
            await served.stub.SetAdapters(request, timeout=SECONDS)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    assert await order(2, "/a") is grpc.StatusCode.OK
    assert [each.source for each in served.instance.ordered_adapters] == ["/a"]
    assert await order(2, "/a", "/b") is grpc.StatusCode.INVALID_ARGUMENT
    assert await order(1) is grpc.StatusCode.FAILED_PRECONDITION
    assert await order(3) is grpc.StatusCode.OK
    assert served.instance.ordered_adapters == ()
