"""The endpoint picker over a real gRPC channel, with the messages of Envoy in their order.

e2e/test_envoy.py has a real Envoy.
"""

import asyncio
import contextlib
import json
import tracemalloc
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cleave.api.enums import DispatchPolicy
from cleave.gateway.admission import controller
from cleave.gateway.admission.api_keys import ApiKeys
from cleave.gateway.config import GatewayConfig
from cleave.gateway.context import GatewayContext
from cleave.gateway.endpoint_picker import server
from cleave.gateway.endpoint_picker.credentials import EndpointPickerError
from cleave.gateway.endpoint_picker.ext_proc import CHUNK_BYTES, ENDPOINT_KEY, NAMESPACE
from cleave.gateway.endpoint_picker.server import EndpointPickerServer, format_gateway_address
from cleave.gateway.http.completion_request import set_cache_salt
from cleave.router.registry import InstanceRegistry
from cleave.router.router import Router
from cleave.rpc.v1 import agent_pb2
from cleave.rpc.v1 import external_processor_pb2 as pb

from tests.support.completions import parse_completion
from tests.support.ext_proc_client import (
    ASK,
    BUFFERED,
    DUPLEX,
    NONE,
    PATIENCE_S,
    Placed,
    Proxy,
    headers_of,
)
from tests.support.ports import find_free_port

MODES = [pytest.param(DUPLEX, id="full-duplex"), pytest.param(BUFFERED, id="buffered")]


@pytest.fixture
async def make_picker_stage(make_stage):
    """Makes a stage with a picker; what it gives makes a Proxy for each request."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(engines: dict[str, str], *, direct: bool = True, **options: object):
            port = find_free_port()
            stage = await make_stage(
                engines,
                endpoint_picker_port=port,
                endpoint_picker_direct=direct,
                endpoint_picker_plain=True,
                **options,
            )
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
            await stack.enter_async_context(channel)
            stage.channel, stage.picker = channel, f"127.0.0.1:{port}"
            stage.address = f"127.0.0.1:{stage.gateway.port}"
            stage.proxy = lambda *modes: Proxy(stage, channel, *modes)
            stage.endpoint_of = lambda name: f"127.0.0.1:{stage.engines[name].port}"
            return stage

        yield make


@pytest.mark.parametrize("mode", MODES)
async def test_a_whole_request_goes_to_an_instance_and_is_in_its_books(
    make_picker_stage, mode
) -> None:
    stage = await make_picker_stage({"x": "mixed"})
    proxy = stage.proxy(mode)
    placed = await proxy.ask()
    assert placed.endpoints == [stage.endpoint_of("x"), stage.address]
    assert json.loads(placed.body) == ASK
    in_flight = stage.context.router.registry.instances["x"].in_flight
    assert in_flight.num_requests == 1
    assert in_flight.prompt.own > 0
    seen = await proxy.answer(200, b'{"usage":{"completion', b'_tokens": 3}}')
    assert seen == b'{"usage":{"completion_tokens": 3}}'
    assert await proxy.is_left_alone()
    await stage.until_idle()
    assert stage.context.metrics.requests["m", "ok"] == 1


async def test_the_prompt_leaves_the_books_with_the_first_bytes_of_the_answer(
    make_picker_stage,
) -> None:
    stage = await make_picker_stage({"x": "mixed"})
    proxy = stage.proxy()
    await proxy.ask({**ASK, "stream": True})
    in_flight = stage.context.router.registry.instances["x"].in_flight
    await proxy.send(response_headers=headers_of({":status": "200"}, False))
    await proxy.hear()
    assert in_flight.prompt.own > 0
    await proxy.pass_on(b"data: {}\n\n")
    assert in_flight.prompt.own == 0
    assert in_flight.num_requests == 1
    proxy.stream.cancel()
    await stage.until_idle()


@pytest.mark.parametrize("mode", MODES)
async def test_what_can_be_split_goes_to_the_gateway_as_it_came(make_picker_stage, mode) -> None:
    stage = await make_picker_stage({"p": "prefill", "d": "decode"})
    proxy = stage.proxy(mode)
    raw = json.dumps({**ASK, "kv_transfer_params": {}}).encode()
    placed = await proxy.ask(raw)
    assert placed.endpoints == [stage.address]
    assert placed.body == (raw if mode == DUPLEX else b"")
    assert mode != DUPLEX or await proxy.stays()
    assert await proxy.is_left_alone()
    assert stage.is_idle()


async def test_what_cannot_be_split_goes_to_a_decode_instance(make_picker_stage) -> None:
    stage = await make_picker_stage({"p": "prefill", "d": "decode"})
    placed = await stage.proxy().ask({**ASK, "n": 2})
    assert placed.endpoints[0] == stage.endpoint_of("d")


async def test_by_default_everything_goes_to_the_gateway_piece_by_piece(make_picker_stage) -> None:
    stage = await make_picker_stage({"x": "mixed"}, direct=False)
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
    stage = await make_picker_stage({"x": "mixed"}, direct=False)
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


async def test_a_body_that_ends_with_trailers_is_placed_as_well(make_picker_stage) -> None:
    stage = await make_picker_stage({"x": "mixed"})
    proxy = stage.proxy()
    await proxy.head()
    await proxy.send(request_body=pb.HttpBody(body=json.dumps(ASK).encode()))
    await proxy.send(request_trailers=pb.HttpTrailers())
    assert Placed(await proxy.hear()).endpoints[0] == stage.endpoint_of("x")
    streamed = (await proxy.hear()).request_body.response.body_mutation.streamed_response
    assert not streamed.end_of_stream
    assert (await proxy.hear()).HasField("request_trailers")


async def test_engines_see_neither_the_hand_off_nor_the_request_id_of_clients(
    make_picker_stage,
) -> None:
    stage = await make_picker_stage({"x": "mixed"})
    body = {**ASK, "stream": True, "kv_transfer_params": {"remote_engine_id": "b"}}
    placed = await stage.proxy().ask(body, **{"x-request-id": "mine"})
    assert json.loads(placed.body) == {**ASK, "stream": True}
    assert placed.headers["x-request-id"] not in ("", "mine")


async def test_an_adapter_of_which_engines_have_another_name_goes_to_the_gateway(
    make_picker_stage,
) -> None:
    stage = await make_picker_stage({"x": "mixed"})
    adapter = agent_pb2.RuntimeAdapter(name="sql", engine_name="sql@1", loaded=True)
    stage.state(stage.engines["x"], runtime_adapters=[adapter])
    assert (await stage.proxy().ask({**ASK, "model": "sql"})).endpoints == [stage.address]
    placed = await stage.proxy().ask({**ASK, "model": "sql"}, subset=[stage.endpoint_of("x")])
    assert placed.endpoints == [stage.endpoint_of("x")]
    assert json.loads(placed.body)["model"] == "sql@1"


async def test_the_proxy_sends_an_engine_its_key(make_picker_stage) -> None:
    stage = await make_picker_stage({"x": "mixed"})
    placed = await stage.proxy().ask(ASK)
    assert placed.headers["x-cleave-engine-key"] == "key-of-x"


async def test_long_bodies_come_back_in_pieces_that_proxies_take(make_picker_stage) -> None:
    stage = await make_picker_stage({"x": "mixed"})
    body = {**ASK, "prompt": "x" * (2 * CHUNK_BYTES)}
    placed = await stage.proxy().ask(body)
    assert json.loads(placed.body) == body


async def test_the_content_length_of_a_buffered_body_is_rewritten(make_picker_stage) -> None:
    stage = await make_picker_stage({"x": "mixed"})
    placed = await stage.proxy(BUFFERED).ask({**ASK, "kv_transfer_params": {}})
    assert placed.headers["content-length"] == str(len(placed.body))


@pytest.mark.parametrize("mode", MODES)
async def test_a_bad_body_is_refused_in_the_form_of_openai(make_picker_stage, mode) -> None:
    stage = await make_picker_stage({"x": "mixed"})
    placed = await stage.proxy(mode).ask(b"[]")
    status, error = placed.refused
    assert status == 400
    assert error["type"] == "invalid_request_error"
    assert placed.headers["content-type"] == "application/json"
    assert stage.is_idle()


async def test_an_unknown_model_is_refused_with_404(make_picker_stage) -> None:
    stage = await make_picker_stage({"x": "mixed"})
    status, error = (await stage.proxy().ask({**ASK, "model": "other"})).refused
    assert (status, error["code"]) == (404, "model_not_found")
    await stage.until_idle()


async def test_without_an_instance_a_request_is_refused_with_503(make_picker_stage) -> None:
    stage = await make_picker_stage({"x": "mixed"})
    stage.context.router.registry.on_disconnect("x")
    placed = await stage.proxy().ask()
    status, error = placed.refused
    assert (status, error["code"]) == (503, "no_instance")
    assert placed.headers["retry-after"] == "1"
    await stage.until_idle()


async def test_where_requests_may_wait_for_an_instance_they_do_so_at_the_gateway(
    make_picker_stage,
) -> None:
    stage = await make_picker_stage({}, wake_s=5.0)
    assert (await stage.proxy().ask()).endpoints == [stage.address]


async def test_a_full_queue_refuses_with_429(make_picker_stage) -> None:
    stage = await make_picker_stage({"x": "mixed"}, queue_limit=1)
    first = stage.proxy()
    await first.ask()
    placed = await stage.proxy().ask()
    status, error = placed.refused
    assert (status, error["code"]) == (429, "queue_full")
    assert placed.headers["retry-after"] == "1"
    await first.answer(200, b"{}")
    assert (await stage.proxy().ask()).endpoints


async def test_a_tenant_above_its_limit_is_refused_with_429(make_picker_stage, tmp_path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("tenants:\n- {name: t, keys: [secret-of-proxies], maxConcurrent: 1}\n")
    stage = await make_picker_stage({"x": "mixed"}, api_keys=keys)
    known = {"authorization": "Bearer secret-of-proxies"}
    first = stage.proxy()
    assert (await first.ask(**known)).endpoints[0] == stage.endpoint_of("x")
    status, error = (await stage.proxy().ask(**known)).refused
    assert (status, error["code"]) == (429, "concurrency_limit")
    await first.answer(200, b"{}")
    assert (await stage.proxy().ask(**known)).endpoints


async def test_tenants_share_no_prompts_and_suspects_are_refused_here_as_well(
    make_picker_stage, tmp_path
) -> None:
    keys = tmp_path / "keys"
    lines = (f"- {{name: {name}, keys: [secret-of-tenant-{name}]}}\n" for name in "ab")
    keys.write_text("tenants:\n" + "".join(lines))
    stage = await make_picker_stage({"x": "mixed"}, api_keys=keys)
    known = {"authorization": "Bearer secret-of-tenant-a"}
    own = json.loads((await stage.proxy().ask(**known)).body)
    other = {"authorization": "Bearer secret-of-tenant-b"}
    assert own["cache_salt"] != json.loads((await stage.proxy().ask(**other)).body)["cache_salt"]
    suspect = parse_completion(b"/v1/completions", json.dumps(ASK).encode())
    set_cache_salt(suspect, own["cache_salt"])
    stage.context.suspect_requests.add(b"/v1/completions", suspect, stage.context.clock())
    status, error = (await stage.proxy().ask(**known)).refused
    assert (status, error["code"]) == (502, "suspect_request")
    assert (await stage.proxy().ask(**other)).endpoints


async def test_a_suspect_sender_gets_one_engine_here_as_well(make_picker_stage, tmp_path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("tenants:\n- {name: a, keys: [secret-of-tenant-a]}\n")
    stage = await make_picker_stage({f"x{number}": "mixed" for number in range(6)}, api_keys=keys)
    known = {"authorization": "Bearer secret-of-tenant-a"}

    async def list_endpoints() -> set[str]:
        return {(await stage.proxy().ask(**known)).endpoints[0] for _ in range(6)}

    assert len(await list_endpoints()) > 1
    stage.context.suspect_senders.add("a", stage.context.clock())
    assert len(await list_endpoints()) == 1


async def test_without_a_key_the_gateway_is_named_which_refuses(
    make_picker_stage, tmp_path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret-of-proxies\n")
    stage = await make_picker_stage({"x": "mixed"}, api_keys=keys)
    assert (await stage.proxy().ask()).endpoints == [stage.address]


async def test_a_body_above_the_limit_is_refused_with_413(make_picker_stage) -> None:
    stage = await make_picker_stage({"x": "mixed"}, max_body_bytes=100)
    proxy = stage.proxy()
    await proxy.head()
    await proxy.send(request_body=pb.HttpBody(body=b"x" * 101))
    status, error = Placed(await proxy.hear()).refused
    assert (status, error["code"]) == (413, "body_too_large")


async def test_bodies_share_the_buffers_of_the_gateway(make_picker_stage) -> None:
    stage = await make_picker_stage({"x": "mixed"}, max_buffered_bytes=100, max_body_bytes=100)
    first, second = stage.proxy(), stage.proxy()
    await first.head()
    await first.send(request_body=pb.HttpBody(body=b"x" * 60))
    await stage.until(lambda: stage.context.buffer_budget.used == 60, "it has come")
    await second.head()
    await second.send(request_body=pb.HttpBody(body=b"x" * 60))
    status, error = Placed(await second.hear()).refused
    assert (status, error["code"]) == (503, "receiving_too_much")
    await first.send(request_body=pb.HttpBody(body=b"x" * 60))
    assert Placed(await first.hear()).refused[0] == 413
    await stage.until(lambda: stage.context.buffer_budget.used == 0, "nothing is left")


@pytest.mark.parametrize("as_text", [False, True], ids=["list", "text"])
async def test_only_endpoints_that_the_proxy_allows_are_named(make_picker_stage, as_text) -> None:
    stage = await make_picker_stage({"a": "mixed", "b": "mixed", "c": "mixed"})
    subset = [stage.endpoint_of("b"), "10.0.0.1:80"]
    for _ in range(3):
        placed = await stage.proxy().ask(subset=",".join(subset) if as_text else subset)
        assert placed.endpoints == [stage.endpoint_of("b")]


async def test_where_the_gateway_is_not_allowed_nothing_is_split(make_picker_stage) -> None:
    stage = await make_picker_stage({"p": "prefill", "d": "decode"})
    placed = await stage.proxy().ask(subset=[stage.endpoint_of("d"), stage.endpoint_of("p")])
    assert placed.endpoints == [stage.endpoint_of("d")]


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "gateway"])
async def test_where_nothing_of_ours_is_allowed_the_answer_is_503(
    make_picker_stage, direct
) -> None:
    stage = await make_picker_stage({"x": "mixed"}, direct=direct)
    proxy = stage.proxy()
    await proxy.head(subset=[])
    await proxy.body(json.dumps(ASK).encode())
    assert Placed(await proxy.hear()).refused[0] == 503


async def test_a_proxy_that_vanishes_leaves_nothing_in_the_books(make_picker_stage) -> None:
    stage = await make_picker_stage({"x": "mixed"})
    for phase in ("asked", "answered"):
        proxy = stage.proxy()
        await proxy.ask()
        if phase == "answered":
            await proxy.send(response_headers=headers_of({":status": "200"}, False))
            await proxy.hear()
        assert stage.context.metrics.in_flight == 1
        proxy.stream.cancel()
        await stage.until_idle()
    assert stage.context.metrics.requests["m", "cancelled"] == 2


async def test_a_request_of_which_nothing_more_is_heard_leaves_the_books(make_picker_stage) -> None:
    stage = await make_picker_stage({"x": "mixed"}, response_s=0.3)
    proxy = stage.proxy()
    await proxy.ask()
    await stage.until_idle()
    assert await proxy.answer(200, b"late") == b"late"
    assert stage.is_idle()


@pytest.mark.interpreted
async def test_a_request_that_waits_past_its_deadline_is_answered(
    make_picker_stage, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(controller, "BACKLOG_LIMIT_TOKENS", 0.0)
    keys = tmp_path / "keys"
    keys.write_text("tenants:\n- {name: t, keys: [secret-of-proxies], maxConcurrent: 9}\n")
    stage = await make_picker_stage({"x": "mixed"}, api_keys=keys, response_s=0.3)
    status, error = (await stage.proxy().ask(authorization="Bearer secret-of-proxies")).refused
    assert (status, error["code"]) == (504, "engine_timeout")
    await stage.until_idle()


async def test_a_queue_that_siblings_have_filled_refuses_as_well(make_picker_stage) -> None:
    stage = await make_picker_stage({"x": "mixed"})
    stage.context.queue_limit = 0
    assert (await stage.proxy().ask()).refused[0] == 429


async def test_a_request_that_does_not_go_on_is_given_up(make_picker_stage) -> None:
    stage = await make_picker_stage({"x": "mixed"}, idle_s=0.2)
    proxy = stage.proxy()
    await proxy.head()
    with pytest.raises(grpc.aio.AioRpcError) as given_up:
        await proxy.stream.read()
    assert given_up.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_call_without_a_message_is_given_up(make_picker_stage) -> None:
    stage = await make_picker_stage({"x": "mixed"}, idle_s=0.2)
    with pytest.raises(grpc.aio.AioRpcError) as given_up:
        await asyncio.wait_for(stage.proxy().stream.read(), PATIENCE_S)
    assert given_up.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("direct", [True, False])
async def test_a_response_of_which_nothing_comes_gives_its_place_back(
    make_picker_stage, direct: bool
) -> None:
    waits = {"response_s": 0.2, "first_byte_s": 0.2}
    stage = await make_picker_stage({"x": "mixed"}, direct=direct, **waits)
    proxy = stage.proxy()
    await proxy.ask()
    assert await proxy.is_left_alone()
    assert not stage.context.buffer_budget.used
    await stage.until_idle()


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


async def test_what_is_kept_for_a_proxy_that_reads_nothing_is_given_back(make_picker_stage) -> None:
    stage = await make_picker_stage({"x": "mixed"}, idle_s=0.2)
    channel, counted = await stop_reading(stage), stage.context.metrics.requests
    await stage.until(lambda: counted["m", "cancelled"] == 1, "it has ended")
    await stage.until_idle()
    await stage.until(lambda: not stage.context.buffer_budget.used, "its body is forgotten")
    await channel.close()


@pytest.mark.interpreted
async def test_the_place_of_a_proxy_that_reads_nothing_ends_with_its_connection(
    make_picker_stage, monkeypatch
) -> None:
    ages = {"grpc.max_connection_age_ms": 200, "grpc.max_connection_age_grace_ms": 200}
    options = [(name, ages.get(name, value)) for name, value in server.SERVER_OPTIONS]
    monkeypatch.setattr(server, "SERVER_OPTIONS", tuple(options))
    stage = await make_picker_stage({"x": "mixed"}, direct=False, idle_s=0.1, max_clients=1)
    channel = await stop_reading(stage)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                assert (await stage.proxy().ask()).endpoints
                break
            await asyncio.sleep(0.02)
    await channel.close()


@pytest.mark.interpreted
async def test_a_body_that_comes_too_slowly_is_given_up(make_picker_stage, monkeypatch) -> None:
    monkeypatch.setattr(server, "MIN_BODY_RATE", 1 << 20)
    stage = await make_picker_stage({"x": "mixed"}, idle_s=0.3)
    proxy = stage.proxy()
    await proxy.head()

    async def drip() -> None:
        with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            while True:
                for piece in (b"x", b""):
                    await proxy.send(request_body=pb.HttpBody(body=piece))
                    await asyncio.sleep(0.01)

    dripping = asyncio.create_task(drip())
    with pytest.raises(grpc.aio.AioRpcError) as given_up:
        await proxy.stream.read()
    if given_up.value.details() != "Internal error from Core":
        # Which gRPC says of a message that could not be sent, before it has read the status.
        assert given_up.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await dripping
    await stage.until(lambda: stage.context.buffer_budget.used == 0, "nothing is left")


async def test_of_a_body_only_its_bytes_are_kept(make_picker_stage) -> None:
    """However many messages it comes in."""
    stage = await make_picker_stage({"x": "mixed"})
    picker = server.EndpointPicker(stage.context, stage.address, True)
    messages = [pb.ProcessingRequest(request_body=pb.HttpBody(body=each)) for each in (b"", b" ")]

    class Stream:
        num = 0

        async def read(self) -> object:
            self.num += 1
            if not self.num % 50:
                await asyncio.sleep(0)
            return messages[self.num % 2] if self.num <= 4_000 else grpc.aio.EOF

    tracemalloc.start()
    try:
        assert await picker._read_body(Stream()) is None
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()
    assert stage.context.buffer_budget.used == 0


@pytest.mark.parametrize("roles", [{"p": "prefill", "d": "decode"}, {"x": "mixed"}], ids=str)
async def test_trailers_follow_a_body_in_many_pieces(make_picker_stage, roles) -> None:
    stage = await make_picker_stage(roles)
    proxy = stage.proxy()
    await proxy.head()
    raw = json.dumps(ASK).encode()
    for at in range(len(raw)):
        await proxy.send(request_body=pb.HttpBody(body=raw[at : at + 1]))
        await proxy.send(request_body=pb.HttpBody())
    await proxy.send(request_trailers=pb.HttpTrailers())
    Placed(await proxy.hear())
    streamed = (await proxy.hear()).request_body.response.body_mutation.streamed_response
    assert json.loads(streamed.body) == ASK
    assert not streamed.end_of_stream
    assert (await proxy.hear()).HasField("request_trailers")


async def test_without_response_events_a_request_ends_with_its_stream(make_picker_stage) -> None:
    stage = await make_picker_stage({"x": "mixed"})
    proxy = stage.proxy(DUPLEX, NONE)
    await proxy.ask()
    await proxy.send(response_headers=headers_of({":status": "200"}, False))
    await proxy.hear()
    await proxy.stream.done_writing()
    await stage.until_idle()
    assert stage.context.metrics.requests["m", "ok"] == 1


@pytest.mark.interpreted
async def test_lengths_are_learnt_from_usage_or_else_from_events(make_picker_stage) -> None:
    stage = await make_picker_stage({"x": "mixed"})
    lengths = stage.context.router.length_predictor
    learnt = []
    lengths.observe = lambda prompt, output: learnt.append(output)
    for pieces in (
        [b'{"choices":[],"usage":{"completion_tokens":41}}'],
        [b'data: {"a":1}\n', b'\ndata: {"a":2}\n\n', b"data: [DONE]\n\n"],
        [b'data: {"a":1}\n\n', b'data: {"usage":{"completion_tokens": 7}}\n\ndata: [DONE]\n\n'],
    ):
        proxy = stage.proxy()
        await proxy.ask()
        await proxy.answer(200, *pieces)
    assert learnt == [41, 2, 7]


@pytest.mark.interpreted
async def test_nothing_is_learnt_from_errors_and_their_instance_is_doubted(
    make_picker_stage,
) -> None:
    stage = await make_picker_stage({"x": "mixed"})
    stage.context.router.length_predictor.observe = lambda *_: pytest.fail("learnt from an error")
    for _ in range(3):
        proxy = stage.proxy()
        await proxy.ask()
        await proxy.answer(503, b'{"a":1}\n\n')
    assert stage.context.circuit_breaker.list_suspects(stage.context.clock()) == {"x"}
    assert stage.context.metrics.requests["m", "failed"] == 3


@pytest.mark.parametrize(("status", "computed"), [(200, True), (400, False), (503, False)])
async def test_an_error_is_no_proof_that_its_prompt_was_computed(
    make_picker_stage, status, computed
) -> None:
    stage = await make_picker_stage({"x": "mixed"}, policy=DispatchPolicy.PREFIX_AWARE)
    proxy = stage.proxy()
    await proxy.ask({**ASK, "prompt": 2_000 * "word "})
    in_flight = stage.context.router.registry.instances["x"].in_flight
    await proxy.answer(status, b'{"error": {}}')
    await stage.until_idle()
    assert (in_flight.predict_hits()[0] > 0) is computed
    assert (in_flight.read_clock() > 0) is computed
    assert in_flight.prompt.own == 0


async def test_a_request_that_another_endpoint_served_leaves_the_books_of_the_first(
    make_picker_stage,
) -> None:
    stage = await make_picker_stage({"x": "mixed"})
    proxy = stage.proxy()
    await proxy.ask()
    await proxy.send(
        response_headers=headers_of({":status": "200"}, False),
        metadata_context=served_by(stage.address),
    )
    await proxy.hear()
    assert stage.context.router.registry.instances["x"].in_flight.num_requests == 0
    assert await proxy.pass_on(b'{"usage":{"completion_tokens":3}}', True)
    await stage.until_idle()
    # The response headers name the endpoint that served it.
    assert sum(stage.context.metrics.requests.values()) == 0
    assert stage.context.metrics.models["m"].output_tokens == 0


def served_by(address: str) -> pb.Metadata:
    metadata = pb.Metadata()
    metadata.filter_metadata[NAMESPACE].update({f"{ENDPOINT_KEY}-served": address})
    return metadata


async def test_a_proxy_that_only_watches_is_left_alone(make_picker_stage) -> None:
    stage = await make_picker_stage({"x": "mixed"})
    proxy = stage.proxy()
    await proxy.send(
        request_headers=headers_of({":method": "POST"}, False), observability_mode=True
    )
    assert await proxy.is_left_alone()


async def test_picks_follow_instances_that_come_and_go(make_picker_stage) -> None:
    stage = await make_picker_stage({"x": "mixed"})
    await stage.proxy().ask()
    stage.context.router.registry.remove_agent("x")
    await stage.add("y", "mixed")
    assert (await stage.proxy().ask()).endpoints[0] == stage.endpoint_of("y")


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


async def test_at_its_end_a_gateway_waits_for_answers_that_pass_by_it(make_picker_stage) -> None:
    stage = await make_picker_stage({"x": "mixed"})
    proxy = stage.proxy()
    await proxy.ask()
    ending = asyncio.create_task(stage.gateway.stop())
    await asyncio.sleep(0.1)
    with pytest.raises(grpc.aio.AioRpcError):
        await stage.proxy().ask()
    assert not ending.done()
    assert await proxy.answer(200, b"to the ", b"end") == b"to the end"
    await asyncio.wait_for(ending, PATIENCE_S)
    assert stage.context.metrics.requests["m", "ok"] == 1


def test_the_endpoint_picker_is_off_by_default() -> None:
    assert GatewayConfig(agents="").endpoint_picker_port == 0
