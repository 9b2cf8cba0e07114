"""The endpoint picker over a real gRPC channel, with the messages of Envoy in their order.

e2e/test_envoy.py has a real Envoy.
"""

import asyncio
import contextlib
import json
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cleave.gateway.admission.api_keys import ApiKeys
from cleave.gateway.config import GatewayConfig
from cleave.gateway.context import GatewayContext
from cleave.gateway.endpoint_picker import server
from cleave.gateway.endpoint_picker.credentials import EndpointPickerError
from cleave.gateway.endpoint_picker.ext_proc import CHUNK_BYTES
from cleave.gateway.endpoint_picker.server import EndpointPickerServer, format_gateway_address
from cleave.router.registry import InstanceRegistry
from cleave.router.router import Router
from cleave.rpc.v1 import external_processor_pb2 as pb

from tests.support.ext_proc_client import (
    ASK,
    PATIENCE_S,
    Placed,
    Proxy,
    headers_of,
)
from tests.support.ports import find_free_port


@pytest.fixture
async def make_picker_stage(make_stage):
    """Makes a stage with a picker; what it returns makes a Proxy for each request."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(engines: dict[str, str], **options: object):
            port = find_free_port()
            stage = await make_stage(
                engines,
                endpoint_picker_port=port,
                endpoint_picker_plain=True,
                **options,
            )
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
            await stack.enter_async_context(channel)
            stage.channel, stage.picker = channel, f"127.0.0.1:{port}"
            stage.address = f"127.0.0.1:{stage.gateway.port}"
            stage.proxy = lambda *modes: Proxy(stage, channel, *modes)
            return stage

        yield make


async def test_everything_goes_to_the_gateway_piece_by_piece(make_picker_stage) -> None:
    stage = await make_picker_stage({"x": "mixed"})
    proxy = stage.proxy()
    await proxy.head()
    assert Placed(await proxy.hear()).endpoints == [stage.address]
    for end, piece in enumerate((b"not even ", b"JSON")):
        await proxy.send(request_body=pb.HttpBody(body=piece, end_of_stream=bool(end)))
        streamed = (await proxy.hear()).request_body.response.body_mutation.streamed_response
        assert (streamed.body, streamed.end_of_stream) == (piece, bool(end))
    assert await proxy.stays()
    assert await proxy.is_left_alone()


@pytest.mark.parametrize("mode", [pb.NONE, pb.STREAMED, pb.BUFFERED, pb.BUFFERED_PARTIAL])
async def test_where_the_proxy_keeps_the_body_the_gateway_is_named_without_it(
    make_picker_stage, mode
) -> None:
    stage = await make_picker_stage({"x": "mixed"})
    proxy = stage.proxy(mode)
    await proxy.head()
    assert Placed(await proxy.hear()).endpoints == [stage.address]
    assert await proxy.is_left_alone()


@pytest.mark.parametrize(
    "head",
    [
        {"path": "/v1/models", "method": "GET", "bodiless": True},
        {"path": "/v1/embeddings", "bodiless": True},
        {"path": "/somewhere", "bodiless": True},
    ],
    ids=["models", "embeddings", "unknown"],
)
async def test_what_is_no_completion_goes_to_the_gateway(make_picker_stage, head) -> None:
    stage = await make_picker_stage({"x": "mixed"})
    proxy = stage.proxy()
    await proxy.head(**head)
    assert Placed(await proxy.hear()).endpoints == [stage.address]
    assert await proxy.stays()
    assert await proxy.is_left_alone()


async def test_long_bodies_come_back_in_pieces_that_proxies_take(make_picker_stage) -> None:
    stage = await make_picker_stage({"x": "mixed"})
    body = {**ASK, "prompt": "x" * (2 * CHUNK_BYTES)}
    placed = await stage.proxy().ask(body)
    assert json.loads(placed.body) == body


@pytest.mark.parametrize("as_text", [False, True], ids=["list", "text"])
async def test_the_gateway_is_named_where_the_proxy_allows_it(make_picker_stage, as_text) -> None:
    stage = await make_picker_stage({"x": "mixed"})
    subset = ["10.0.0.1:80", stage.address]
    placed = await stage.proxy().ask(subset=",".join(subset) if as_text else subset)
    assert placed.endpoints == [stage.address]


async def test_where_this_gateway_is_not_allowed_the_answer_is_503(make_picker_stage) -> None:
    stage = await make_picker_stage({"x": "mixed"})
    proxy = stage.proxy()
    await proxy.head(subset=["10.0.0.1:80"])
    assert Placed(await proxy.hear()).refused[0] == 503


async def test_a_request_that_does_not_go_on_is_given_up(make_picker_stage) -> None:
    stage = await make_picker_stage({"x": "mixed"}, idle_s=0.2)
    proxy = stage.proxy()
    await proxy.head()
    Placed(await proxy.hear())
    with pytest.raises(grpc.aio.AioRpcError) as given_up:
        await proxy.stream.read()
    assert given_up.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_call_without_a_message_is_given_up(make_picker_stage) -> None:
    stage = await make_picker_stage({"x": "mixed"}, idle_s=0.2)
    with pytest.raises(grpc.aio.AioRpcError) as given_up:
        await asyncio.wait_for(stage.proxy().stream.read(), PATIENCE_S)
    assert given_up.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_response_of_which_nothing_comes_gives_its_place_back(make_picker_stage) -> None:
    waits = {"response_s": 0.2, "first_byte_s": 0.2}
    stage = await make_picker_stage({"x": "mixed"}, **waits)
    proxy = stage.proxy()
    await proxy.ask()
    assert await proxy.is_left_alone()


async def stop_reading(stage) -> grpc.aio.Channel:
    """A call whose proxy sends a body and reads nothing of what is sent back."""
    channel = grpc.aio.insecure_channel(stage.picker, options=(("grpc.http2.bdp_probe", 0),))
    proxy = Proxy(stage, channel)
    raw = json.dumps(ASK | {"prompt": "long " * 200_000}).encode()
    await proxy.head()
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
        async with asyncio.timeout(0.2):
            await proxy.body(
                *(raw[at : at + CHUNK_BYTES] for at in range(0, len(raw), CHUNK_BYTES))
            )
    return channel


@pytest.mark.interpreted
async def test_the_place_of_a_proxy_that_reads_nothing_ends_with_its_connection(
    make_picker_stage, monkeypatch
) -> None:
    ages = {"grpc.max_connection_age_ms": 200, "grpc.max_connection_age_grace_ms": 200}
    options = [(name, ages.get(name, value)) for name, value in server.SERVER_OPTIONS]
    monkeypatch.setattr(server, "SERVER_OPTIONS", tuple(options))
    stage = await make_picker_stage({"x": "mixed"}, idle_s=0.1, max_clients=1)
    channel = await stop_reading(stage)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                assert (await stage.proxy().ask()).endpoints
                break
            await asyncio.sleep(0.02)
    await channel.close()


async def test_trailers_follow_a_body_in_many_pieces(make_picker_stage) -> None:
    stage = await make_picker_stage({"x": "mixed"})
    proxy = stage.proxy()
    await proxy.head()
    Placed(await proxy.hear())
    for piece in (b"in ", b"many ", b"pieces"):
        await proxy.send(request_body=pb.HttpBody(body=piece))
        streamed = (await proxy.hear()).request_body.response.body_mutation.streamed_response
        assert (streamed.body, streamed.end_of_stream) == (piece, False)
    await proxy.send(request_trailers=pb.HttpTrailers())
    assert (await proxy.hear()).HasField("request_trailers")


async def test_a_proxy_that_only_watches_is_left_alone(make_picker_stage) -> None:
    stage = await make_picker_stage({"x": "mixed"})
    proxy = stage.proxy()
    await proxy.send(
        request_headers=headers_of({":method": "POST"}, False), observability_mode=True
    )
    assert await proxy.is_left_alone()


async def test_health_follows_the_grpc_protocol(make_picker_stage) -> None:
    stage = await make_picker_stage({})
    stub = health_pb2_grpc.HealthStub(stage.channel)

    async def check(service: str) -> int:
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status

    serving, not_serving = (
        health_pb2.HealthCheckResponse.ServingStatus.Value(name)
        for name in ("SERVING", "NOT_SERVING")
    )
    process = "envoy.service.ext_proc.v3.ExternalProcessor"
    assert [await check(s) for s in ("liveness", "readiness", process)] == [
        serving,
        not_serving,
        not_serving,
    ]
    await stage.add("x", "mixed")
    assert [await check(s) for s in ("", "readiness", process)] == [serving] * 3
    stage.context.draining = True
    assert await check("readiness") == not_serving
    stage.context.draining = False
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await check("other")
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_can_be_watched(make_picker_stage) -> None:
    stage = await make_picker_stage({})
    stub = health_pb2_grpc.HealthStub(stage.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service="readiness"))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    await stage.add("x", "mixed")
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()


async def test_who_watches_health_does_not_keep_a_gateway_from_ending(make_picker_stage) -> None:
    stage = await make_picker_stage({"x": "mixed"}, drain_s=600.0)
    stub = health_pb2_grpc.HealthStub(stage.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service="readiness"))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    await asyncio.wait_for(stage.gateway.stop(), PATIENCE_S)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert await watch.read() is grpc.aio.EOF


def test_a_picker_needs_an_address_that_proxies_can_reach() -> None:
    assert format_gateway_address("10.0.0.7", 8080) == "10.0.0.7:8080"
    assert format_gateway_address("fd00::7", 8080) == "[fd00::7]:8080"
    for host in ("0.0.0.0", "::", "localhost"):
        with pytest.raises(EndpointPickerError, match=f"--host {host}"):
            format_gateway_address(host, 8080)


async def test_a_picker_cannot_name_a_gateway_that_speaks_https() -> None:
    config = GatewayConfig(agents="", tls_certificate=Path("tls.crt"), tls_key=Path("tls.key"))
    router = Router(InstanceRegistry())
    with pytest.raises(EndpointPickerError, match="leave out --tls-cert"):
        await EndpointPickerServer(GatewayContext(config, router, ApiKeys(None))).start(0, 8080)


def test_the_endpoint_picker_is_off_by_default() -> None:
    assert GatewayConfig(agents="").endpoint_picker_port == 0
