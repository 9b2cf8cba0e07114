"""Paths beside completions: one instance answers, or it is said clearly that none can."""

import json

import pytest

from cleave.gateway.app.handlers import _OTHER_PATHS
from cleave.gateway.http.engine_fields import TABLES

HAND_OFF = {"kv_transfer_params": {"remote_engine_id": "x"}}


def answer(body: bytes, status: int = 200, kind: str = "application/json"):
    async def script(engine, request, writer) -> None:
        engine.send(writer, status, body, kind)

    return script


@pytest.mark.parametrize("path", sorted(_OTHER_PATHS))
async def test_one_instance_answers_and_gets_what_engines_read(pair, path: bytes) -> None:
    body = b'{"data": [ 1.50 ], "usage": {"prompt_tokens": 4, "completion_tokens": null}}'
    pair.engines["d"].script = answer(body)
    fields = {"input", "prompt", "query", "text_1", "tokens"} & TABLES[path].plain
    response_request = {"model": "m", **dict.fromkeys(fields, "hello")}
    unknown = {"request_id": "r", "store": True, "data_parallel_rank": 1}
    response = await pair.ask(response_request | HAND_OFF | unknown, path.decode())
    assert (response.status, response.body) == (200, body)
    assert not pair.engines["p"].requests
    (request,) = pair.engines["d"].requests
    assert (request.path, request.body) == (path.decode(), response_request)
    assert pair.context.metrics.requests == {("m", "ok"): 1}
    await pair.until_idle()


async def test_a_path_the_engine_lacks_differs_from_an_unknown_path(single) -> None:
    single.engines["x"].script = answer(b'{"detail":"Not Found"}', 404)
    response = await single.ask({"model": "m", "input": "a"}, "/v1/embeddings")
    assert (response.status, response.error["code"]) == (501, "not_offered_by_engine")
    assert "/v1/embeddings" in response.error["message"]
    theirs = {"error": {"message": "no such response", "code": 404}}
    single.engines["x"].script = answer(json.dumps(theirs).encode(), 404)
    response = await single.ask({"model": "m", "input": "a"}, "/pooling")
    assert (response.status, response.error["message"]) == (404, "no such response")


async def test_where_one_model_is_served_it_need_not_be_named(make_stage) -> None:
    stage = await make_stage({"x": "mixed"})
    stage.engines["x"].script = answer(b'{"tokens": [1]}')
    assert (await stage.ask({"prompt": "a"}, "/tokenize")).status == 200
    assert stage.engines["x"].requests[0].body == {"prompt": "a", "model": "m"}
    other = await stage.add("y", "mixed")
    stage.state(other, model="n")
    response = await stage.ask({"prompt": "a"}, "/tokenize")
    assert (response.status, response.error["param"]) == (400, "model")
    assert (await stage.ask({"prompt": "a"}, "/v1/completions")).status == 400


async def test_another_kind_of_stream_passes_and_its_break_is_reported_in_its_format(
    single,
) -> None:
    engine = single.engines["x"]
    event = b'event: delta\ndata: {"type": "delta"}\n\n'

    async def stream(_, request, writer) -> None:
        engine.send_stream_head(writer)
        engine.send_chunk(writer, event[:30])
        await writer.drain()
        engine.send_chunk(writer, event[30:] + event)
        await writer.drain()
        if len(engine.requests) == 1:
            writer.write(b"0\r\n\r\n")
        else:
            writer.transport.abort()

    engine.script = stream
    body = {"model": "m", "input": "a", "stream": True}
    response = await single.ask(body, "/pooling")
    assert (response.status, response.body) == (200, event * 2)
    response = await single.ask(body, "/pooling")
    last_event = response.events[-1]
    assert last_event.startswith(b"event: error\ndata: ")
    await single.until_idle()


async def test_a_failed_call_is_retried_elsewhere(make_stage) -> None:
    stage = await make_stage({"a": "mixed", "b": "mixed"})
    for engine in stage.engines.values():
        engine.script = answer(b'{"tokens": [1]}')
    first = stage.engines["a"]
    first.script = answer(b"boom", 500)
    statuses = [(await stage.ask({"prompt": "a"}, "/tokenize")).status for _ in range(4)]
    assert statuses == [200] * 4


async def test_a_single_model_can_be_requested_by_its_name(pair) -> None:
    pair.state(pair.engines["p"], model="org/name")
    pair.state(pair.engines["d"], model="org/name")
    for name in ("org/name", "org%2Fname"):
        response = await pair.ask(None, f"/v1/models/{name}")
        assert (response.status, response.json()["id"]) == (200, "org/name")
    assert (await pair.ask(None, "/v1/models/none")).error["code"] == "model_not_found"
    assert (await pair.ask({}, "/v1/models/none")).status == 405
