"""The Router service over a real gRPC channel."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from cleave.api.enums import FallbackPolicy
from cleave.gateway.tls import TlsCertificate, make_grpc_credentials
from cleave.router import grpc_service
from cleave.router.grpc_service import MAX_LEASE_S, RouterServer, RouterService
from cleave.router.router import Router
from cleave.rpc.v1 import agent_pb2, router_pb2, router_pb2_grpc

from tests.support.certificates import Files


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path).write()


@pytest.fixture
async def stub(registry, files: Files) -> AsyncIterator[router_pb2_grpc.RouterStub]:
    server = RouterServer(Router(registry, FallbackPolicy.ON_PREFILL_LOSS), lambda: 0.0)
    port = await server.start("127.0.0.1", 0, make_credentials(files))
    async with files.dial(port, files) as channel:
        yield router_pb2_grpc.RouterStub(channel)
    await server.stop()


def make_credentials(files: Files) -> grpc.ServerCredentials:
    """Of a port whose certificate is its callers' authority, too."""
    read = TlsCertificate(files.certificate, files.key).read_again
    return make_grpc_credentials(read, files.certificate)


async def test_a_ticket_counts_as_load_until_it_is_released(stub, fleet_of) -> None:
    registry = fleet_of(p="prefill", d="decode")
    picked = await stub.Pick(router_pb2.PickRequest(model="m", prompt_tokens=100, output_tokens=10))
    assert (picked.prefill.instance, picked.decode.instance) == ("p", "d")
    assert picked.reason == "disaggregated"
    assert registry.instances["d"].in_flight.resident.own == 110
    prefill = router_pb2.PHASE_PREFILL
    await stub.Release(router_pb2.ReleaseRequest(ticket=picked.ticket, phase=prefill))
    assert registry.instances["p"].in_flight.prompt.own == 0
    for _ in range(2):
        await stub.Release(router_pb2.ReleaseRequest(ticket=picked.ticket))
    assert registry.instances["d"].in_flight.resident.own == 0


async def test_a_whole_request_has_no_prefill_target(stub, fleet_of) -> None:
    fleet_of(p="prefill", d="decode")
    picked = await stub.Pick(router_pb2.PickRequest(model="m", single_instance=True))
    assert not picked.HasField("prefill")


async def test_callers_get_the_keys_of_the_engines_that_are_picked(
    stub, registry, make_event
) -> None:
    for name, role in {"p": "prefill", "d": "decode"}.items():
        registry.on_event(name, make_event(name, role, engine_key=f"secret-{name}"), 0.0)
    picked = await stub.Pick(router_pb2.PickRequest(model="m"))
    assert (picked.prefill.engine_key, picked.decode.engine_key) == ("secret-p", "secret-d")
    assert "secret" not in f"{await stub.Fleet(router_pb2.FleetRequest())}"
    assert "secret" not in repr(registry.instances["d"].target)


async def test_reports_about_models_are_left_out(stub, registry, make_event) -> None:
    registry.on_event("d", make_event("d", "mixed", model_report="{}"), 0.0)
    (described,) = (await stub.Fleet(router_pb2.FleetRequest())).instances
    assert described.registration.model_report == ""
    assert registry.instances["d"].registration.model_report == "{}"


async def test_errors_are_classified_by_their_codes(stub, fleet_of) -> None:
    fleet_of(d="decode")
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await stub.Pick(router_pb2.PickRequest(model="other"))
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.aio.AioRpcError) as none_left:
        await stub.Pick(router_pb2.PickRequest(model="m"))
    assert none_left.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_an_avoided_prefill_instance_counts_as_a_lost_prefill(stub, fleet_of) -> None:
    fleet_of(p="prefill", d="decode")
    picked = await stub.Pick(router_pb2.PickRequest(model="m", avoid=["p"]))
    assert picked.reason == "no-prefill"


async def test_the_fleet_is_listed_with_the_routers_own_estimates(stub, fleet_of) -> None:
    fleet_of(p="prefill", d="decode")
    await stub.Pick(router_pb2.PickRequest(model="m", prompt_tokens=100, output_tokens=10))
    snapshot = await stub.Fleet(router_pb2.FleetRequest())
    seen = {i.registration.instance: (i.pending_tokens, i.selectable) for i in snapshot.instances}
    assert seen == {"p": (100, True), "d": (110, True)}
    assert not (await stub.Fleet(router_pb2.FleetRequest(model="other"))).instances


async def test_a_ticket_that_is_never_released_lapses(fleet_of) -> None:
    registry = fleet_of(p="prefill", d="decode")
    now = 100.0
    service = RouterService(Router(registry), lambda: now)
    await service.Pick(router_pb2.PickRequest(model="m", prompt_tokens=5, lease_ms=1_000), None)
    service.expire(100.9)
    assert registry.instances["p"].in_flight.prompt.own == 5
    service.expire(101.0)
    assert registry.instances["p"].in_flight.prompt.own == 0
    assert registry.instances["d"].in_flight.num_requests == 0


async def test_no_caller_has_a_lease_of_days(fleet_of) -> None:
    registry = fleet_of(p="prefill", d="decode")
    service = RouterService(Router(registry), lambda: 0.0)
    await service.Pick(router_pb2.PickRequest(model="m", lease_ms=(1 << 32) - 1), None)
    service.expire(MAX_LEASE_S)
    assert registry.instances["d"].in_flight.num_requests == 0


@pytest.mark.interpreted
async def test_a_fault_in_a_release_keeps_no_other_lease(fleet_of, files, monkeypatch) -> None:
    registry = fleet_of(p="prefill", d="decode")
    router = Router(registry)
    monkeypatch.setattr(grpc_service, "EXPIRY_PERIOD_S", 0.01)
    server, released = RouterServer(router, lambda: 1e9), []
    release = router.release

    def fail_once(pick) -> None:
        released.append(pick)
        if len(released) == 1:
            raise ValueError
        release(pick)

    monkeypatch.setattr(router, "release", fail_once)
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    await server.start("127.0.0.1", 0, make_credentials(files))
    for _ in range(2):
        server._service._leases[len(server._service._leases)] = grpc_service._TicketLease(
            router.pick("m", 1, 1), 0.0
        )
    async with asyncio.timeout(30):
        while len(released) < 2:  # noqa: ASYNC110 - as the event loop does it
            await asyncio.sleep(0.01)
    assert not server._service._leases
    await server.stop()


async def test_callers_learn_the_engines_name_of_an_adapter(stub, registry, make_event) -> None:
    adapter = agent_pb2.RuntimeAdapter(name="sql", engine_name="sql@1", loaded=True)
    registry.on_event("d", make_event("d", "mixed", runtime_adapters=[adapter]), 0.0)
    picked = await stub.Pick(router_pb2.PickRequest(model="sql"))
    assert picked.engine_model == "sql@1"
    listed = (await stub.Fleet(router_pb2.FleetRequest(model="sql"))).instances
    assert [each.registration.instance for each in listed] == ["d"]
