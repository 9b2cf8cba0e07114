"""Adapters through the gateway: listed, served under their names, exact over a hand-off."""

import asyncio
import json

import pytest

from cleave.gateway.admission import controller
from cleave.rpc.v1 import agent_pb2

ASK = {"model": "m", "prompt": "tell me a story " * 20, "max_tokens": 16, "ignore_eos": True}


async def test_adapters_are_listed_with_the_model_that_they_change(pair) -> None:
    for engine in pair.engines.values():
        pair.state(engine, adapters=["sql"], max_model_len=2048)
    listed = (await pair.ask(None, "/v1/models")).json()["data"]
    assert [(each["id"], each["parent"]) for each in listed] == [("m", None), ("sql", "m")]
    assert {each["max_model_len"] for each in listed} == {2048}
    assert (await pair.ask(None, "/v1/models/sql")).json()["parent"] == "m"
    assert (await pair.ask(None, "/v1/models/law")).status == 404
    assert set((await pair.ask(None, "/health")).json()["models"]) == {"m"}


async def test_both_engines_get_the_adapter_name(pair) -> None:
    for engine in pair.engines.values():
        pair.state(engine, adapters=["sql"])
    assert (await pair.ask(ASK | {"model": "sql"})).status == 200
    for engine in pair.engines.values():
        assert [request.body["model"] for request in engine.requests] == ["sql"]
    assert pair.context.metrics.requests == {("sql", "ok"): 1}
    await pair.until_idle()


async def test_an_adapter_is_no_second_model_that_must_be_named(single) -> None:
    single.state(single.engines["x"], adapters=["sql"])
    assert (await single.ask({"prompt": "a"}, "/tokenize")).status == 200
    assert single.engines["x"].requests[0].body["model"] == "m"


@pytest.mark.interpreted
async def test_adapters_and_their_model_take_turns_in_one_queue(
    make_stage, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(controller, "BACKLOG_LIMIT_TOKENS", 1.0)
    keys = tmp_path / "keys.yaml"
    first = {"name": "first", "keys": ["key-of-the-first"], "priority": 1}
    other = {"name": "other", "keys": ["key-of-the-other"]}
    keys.write_text(f"tenants: {json.dumps([other, first])}\n")
    stage = await make_stage({"x": "mixed"}, api_keys=keys)
    engine = stage.engines["x"]
    stage.state(engine, adapters=["sql", "law"])
    opened = stage.hold()
    clients = []
    for number, (model, key) in enumerate(
        (("m", "other"), ("m", "other"), ("sql", "other"), ("law", "first"))
    ):
        clients.append(await stage.connect())
        clients[-1].send(ASK | {"model": model}, Authorization=f"Bearer key-of-the-{key}")
        await stage.until(lambda n=number: stage.context.metrics.in_flight == n + 1, "it has come")
    assert stage.context.admission.count_waiting() == {"m": 3}
    opened.set()
    assert [(await client.read()).status for client in clients] == [200] * 4
    assert [request.body["model"] for request in engine.requests] == ["m", "law", "m", "sql"]
    await stage.until_idle()


async def test_an_adapter_is_waited_for_while_no_engine_has_said_what_it_serves(make_stage) -> None:
    stage = await make_stage({}, wake_s=10.0)
    client = await stage.connect()
    client.send(ASK | {"model": "sql"})
    await stage.until(lambda: stage.context.metrics.in_flight == 1, "it waits")
    engine = await stage.add("x", "mixed")
    stage.state(engine, state=agent_pb2.STATE_STARTING)
    await asyncio.sleep(0.6)
    assert stage.context.metrics.in_flight == 1, "it waits while the engine starts"
    stage.state(engine, adapters=["sql"])
    assert (await client.read()).status == 200
    await stage.until_idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_adapters_answer_is_its_own_and_the_same_over_a_hand_off(
    make_fleet, stream: bool
) -> None:
    stage, engines = await make_fleet({"p": "prefill", "d": "decode"}, adapters=("sql", "law"))
    texts = {}
    for model in ("m", "sql", "law"):
        body = ASK | {"model": model, "stream": stream}
        response = await stage.ask(body)
        assert response.headers["x-cleave-prefill"] == "p"
        whole = await stage.ask(body | {"stream": False, "n": 2, "seed": None})
        assert "x-cleave-prefill" not in whole.headers
        alone = whole.json()["choices"][0]["text"]
        texts[model] = alone
        if stream:
            assert response.body.count(b'"model":"%b"' % model.encode()) >= 16
        else:
            assert response.json()["model"] == model
            assert response.json()["choices"][0]["text"] == alone
    assert len(set(texts.values())) == 3
    assert engines["d"].engine.metrics.external_hits > 0


def load_adapter(stage, name: str, engine_name: str) -> None:
    """State that an instance has loaded `sql` under the engine's name."""
    registry = stage.context.router.registry
    registration = agent_pb2.Registration()
    registration.CopyFrom(registry.instances[name].registration)
    del registration.adapters[:]
    del registration.runtime_adapters[:]
    registration.runtime_adapters.add(name="sql", engine_name=engine_name, loaded=True)
    event = agent_pb2.WatchEvent(registration=registration)
    registry.on_event(name, event, registry.latest_s)


@pytest.mark.parametrize("stream", [False, True])
async def test_engines_and_clients_have_their_own_names_of_a_runtime_adapter(
    make_fleet, stream: bool
) -> None:
    stage, _ = await make_fleet({"p": "prefill", "d": "decode"}, adapters=("sql@1", "sql@2", "law"))
    texts = set()
    for name in ("sql@1", "sql@2"):
        for role in ("p", "d"):
            load_adapter(stage, role, name)
        response = await stage.ask(ASK | {"model": "sql", "stream": stream})
        assert (response.status, response.headers["x-cleave-prefill"]) == (200, "p")
        assert b"sql@" not in response.body
        assert b'"model":"sql"' in response.body
        whole = (await stage.ask(ASK | {"model": "sql"})).json()
        texts.add(whole["choices"][0]["text"])
    assert len(texts) == 2, "each source has its own answer, and its own KV"
    assert (await stage.ask(ASK | {"model": "sql@1"})).status == 404


async def test_an_adapter_that_is_not_loaded_is_not_found_or_unavailable(single) -> None:
    engine = single.engines["x"]
    response = await single.ask(ASK | {"model": "sql"})
    assert (response.status, response.json()["error"]["code"]) == (404, "model_not_found")
    waiting = agent_pb2.RuntimeAdapter(name="sql", engine_name="sql@1", fault="/secret: no file")
    single.state(engine, runtime_adapters=[waiting])
    response = await single.ask(ASK | {"model": "sql"})
    assert (response.status, response.headers["retry-after"]) == (503, "1")
    assert "no instance has loaded the adapter 'sql' yet" in response.json()["error"]["message"]
    assert b"secret" not in response.body
    assert engine.requests == []


async def test_a_request_goes_elsewhere_if_its_engine_has_just_unloaded_the_adapter(
    make_stage,
) -> None:
    stage = await make_stage({"x": "mixed", "y": "mixed"})
    engines = stage.engines

    async def refuse(engine, request, writer) -> None:
        message = "The model `sql@1` does not exist."
        error = {"message": message, "type": "NotFoundError", "code": 404, "param": "model"}
        engine.send_json(writer, {"error": error}, status=404)

    for name in engines:
        load_adapter(stage, name, "sql@1")
    engines["x"].script = refuse
    for _ in range(4):
        assert (await stage.ask(ASK | {"model": "sql"})).status == 200
    assert stage.context.circuit_breaker.failure_states == {}
    engines["y"].script = refuse
    response = await stage.ask(ASK | {"model": "sql"})
    assert response.status in (502, 503)
    assert b"sql@" not in response.body
    await stage.until_idle()


async def test_a_stream_is_not_continued_with_another_source(make_stage) -> None:
    stage = await make_stage({"x": "mixed"})
    engine = stage.engines["x"]
    load_adapter(stage, "x", "sql@1")
    first = {"model": "sql@1", "choices": [{"index": 0, "text": "a", "token_ids": [1]}]}
    first["choices"][0]["prompt_token_ids"] = [5, 6]

    async def break_off(engine, request, writer) -> None:
        event = b"data: %b\n\n" % json.dumps(first, separators=(",", ":")).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
        writer.write(head + event)
        await writer.drain()
        load_adapter(stage, "x", "sql@2")
        await asyncio.sleep(0.05)
        writer.transport.abort()

    engine.script = break_off
    response = await stage.ask(ASK | {"model": "sql", "stream": True, "temperature": 0})
    assert b'"model":"sql"' in response.body
    assert b"another source" in response.body
    assert b"[DONE]" not in response.body
    assert len(engine.requests) == 1
    await stage.until_idle()


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
async def test_clients_load_and_unload_no_adapter(single, path: str) -> None:
    engine = single.engines["x"]
    load_adapter(single, "x", "sql@1")
    for spelled in (path, path + "/", path.upper(), f"/{path}", path + "?a=1"):
        response = await single.ask({"lora_name": "sql@1", "lora_path": "/a"}, spelled)
        assert response.status == 404, spelled
    assert engine.requests == []
