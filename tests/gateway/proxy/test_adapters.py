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
