"""Further names of a model: listed, routed to its engines, and in the answers to their requests."""

import json

import pytest

ASK = {"prompt": "tell me a story " * 20, "max_tokens": 8, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
NAMES = ("m", "org/m", "gpt-4o")


async def test_all_names_are_listed_and_none_has_to_be_said(make_stage) -> None:
    stage = await make_stage({"p": "prefill", "d": "decode"}, model_names=NAMES)
    listed = (await stage.ask(None, "/v1/models")).json()["data"]
    assert [(each["id"], each["parent"]) for each in listed] == [
        (name, None) for name in sorted(NAMES)
    ]
    assert (await stage.ask(None, "/v1/models/org/m")).json()["id"] == "org/m"
    assert {*(await stage.ask(None, "/health")).json()["models"]} == {"m"}
    assert (await stage.ask({"prompt": "a"}, "/tokenize")).status == 200
    assert (await stage.ask(ASK | {"model": "gpt-4"})).status == 404


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", NAMES)
async def test_a_split_request_is_answered_under_the_name_that_it_has(
    make_fleet, name: str, stream: bool
) -> None:
    stage, _ = await make_fleet({"p": "prefill", "d": "decode"}, model_names=NAMES)
    for path, body in (("/v1/completions", ASK), ("/v1/chat/completions", CHAT)):
        response = await stage.ask(body | {"model": name, "stream": stream}, path)
        assert response.status == 200
        events = [line for line in response.body.split(b"\n\n") if b"{" in line]
        answers = [json.loads(line.removeprefix(b"data: ")) for line in events]
        assert {answer["model"] for answer in answers} == {name}


async def test_engines_are_sent_the_name_that_they_know(make_stage) -> None:
    stage = await make_stage({"p": "prefill", "d": "decode"}, model_names=NAMES)
    assert (await stage.ask(ASK | {"model": "gpt-4o"})).status == 200
    for engine in stage.engines.values():
        assert [request.body["model"] for request in engine.requests] == ["m"]
    await stage.until_idle()


async def test_what_engines_have_by_a_name_is_not_hidden(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, model_names=("m", "sql"))
    stage.state(stage.engines["x"], adapters=["sql"])
    assert (await stage.ask(ASK | {"model": "sql"})).status == 200
    assert stage.engines["x"].requests[0].body["model"] == "sql"
