"""One request from pick to last byte, when all goes well."""

import asyncio
import json

import pytest

from cleave.policy.request_targets import TPOT_KEY, TTFT_KEY
from cleave.rpc.engine_key import HEADER

ASK = {"model": "m", "prompt": "hello", "max_tokens": 3}


async def test_a_streamed_request_is_prefilled_here_and_decoded_there(pair) -> None:
    response = await pair.ask(ASK | {"stream": True})
    prefill, decode = pair.engines["p"], pair.engines["d"]
    assert response.status == 200
    assert response.events == [
        *(decode.event(token).strip() for token in decode.tokens),
        b"data: [DONE]",
    ]
    assert [r.is_prefill for r in prefill.requests] == [True]
    assert [r.body for r in decode.requests] == [
        ASK | {"stream": True, "return_token_ids": True, "kv_transfer_params": prefill.handoff()}
    ]
    await pair.until_idle()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_both_engines_get_the_clients_path_and_one_id(pair, path: str) -> None:
    await pair.ask(ASK, path)
    requests = [engine.requests[0] for engine in pair.engines.values()]
    assert {request.path for request in requests} == {path}
    assert len({request.headers["x-request-id"] for request in requests}) == 1


async def test_a_whole_answer_is_the_engines_without_the_hand_off(pair) -> None:
    response = await pair.ask(ASK)
    expected = pair.engines["d"].whole_answer()
    del expected["kv_transfer_params"]
    assert response.json() == expected


async def test_a_hand_off_sent_by_the_client_reaches_no_engine(single) -> None:
    await single.ask(ASK | {"kv_transfer_params": {"remote_engine_id": "x"}})
    assert single.engines["x"].requests[0].body == ASK


async def test_what_cannot_be_split_is_decoded_where_it_is_prefilled(pair) -> None:
    await pair.ask(ASK | {"n": 2})
    assert not pair.engines["p"].requests
    assert "kv_transfer_params" not in pair.engines["d"].requests[0].body


async def test_a_requests_own_priority_reaches_both_engines(pair) -> None:
    assert (await pair.ask(ASK | {"stream": True, "priority": -7})).status == 200
    for engine in pair.engines.values():
        assert [request.body["priority"] for request in engine.requests] == [-7]


async def test_engines_that_schedule_by_targets_get_what_is_left_of_them(make_stage) -> None:
    roles = {"p": "prefill", "d": "decode"}
    stage = await make_stage(roles, sends_targets=True, ttft_slo_ms=10_000.0, tpot_slo_ms=50.0)
    engine_answers = stage.engines["p"].script

    async def wait(engine, request, writer):
        await asyncio.sleep(0.2)
        await engine_answers(engine, request, writer)

    stage.engines["p"].script = wait
    assert (await stage.ask(ASK | {"stream": True})).status == 200
    left = [stage.engines[name].requests[0].body["vllm_xargs"] for name in roles]
    assert [each[TPOT_KEY] for each in left] == [50, 50]
    # A tenth of the target is for the handoff.
    assert 5_000 < left[0][TTFT_KEY] <= 9_000
    assert left[1][TTFT_KEY] <= 9_800


async def test_other_requests_than_completions_get_no_targets(make_stage) -> None:
    stage = await make_stage(
        {"x": "mixed"}, sends_targets=True, ttft_slo_ms=1_000.0, tpot_slo_ms=50.0
    )
    await stage.ask({"model": "m", "input": "hello"}, "/v1/embeddings")
    assert "vllm_xargs" not in stage.engines["x"].requests[0].body


async def test_a_first_token_that_ends_the_answer_hands_nothing_over(pair) -> None:
    """vLLM keeps no KV then; the decode side computes the prompt itself."""

    async def finish_at_once(engine, request, writer):
        engine.send_json(writer, engine.prefill_answer() | {"kv_transfer_params": None})

    pair.engines["p"].script = finish_at_once
    assert (await pair.ask(ASK)).status == 200
    assert pair.engines["d"].requests[0].body == ASK
    assert pair.context.metrics.handoffs == {"none": 1}


async def test_an_answer_names_the_instances(pair) -> None:
    response = await pair.ask(ASK)
    assert (response.headers["x-cleave-prefill"], response.headers["x-cleave-decode"]) == ("p", "d")


async def test_a_sane_request_id_comes_back_but_never_reaches_an_engine(single) -> None:
    responses = [await single.ask(ASK, X_Request_Id="mine") for _ in range(2)]
    assert [r.headers["x-request-id"] for r in responses] == ["mine", "mine"]
    sent = [request.headers["x-request-id"] for request in single.engines["x"].requests]
    assert "mine" not in sent
    assert len(set(sent)) == 2


@pytest.mark.parametrize("strange", ["a b", "x" * 129, "é", "a\tb"])
async def test_a_strange_request_id_is_replaced(single, strange: str) -> None:
    response = await single.ask(ASK, X_Request_Id=strange)
    assert response.headers["x-request-id"] != strange


async def test_the_clients_credentials_stay_here(single) -> None:
    await single.ask(ASK, Authorization="Bearer secret", Cookie="secret")
    assert "secret" not in str(single.engines["x"].requests[0].headers)


async def test_an_engine_that_has_another_key_by_now_is_not_the_clients_fault(make_stage) -> None:
    stage = await make_stage({"x": "mixed", "y": "mixed"})
    stage.engines["x"].key = "of the next start"
    assert [(await stage.ask(ASK)).status for _ in range(4)] == [200] * 4
    assert len(stage.engines["y"].requests) == 4
    await stage.until_idle()


async def test_an_engine_without_a_key_gets_none(make_stage) -> None:
    stage = await make_stage({"x": "mixed"})
    engine = stage.engines["x"]
    engine.key, engine.boot_id = "", "boot-of-an-earlier-version"
    stage.state(engine)
    assert (await stage.ask(ASK)).status == 200
    assert HEADER not in engine.requests[0].headers


async def test_keys_of_engines_reach_no_page_and_no_client(make_stage, internal_port: int) -> None:
    stage = await make_stage({"p": "prefill", "d": "decode"}, internal_port=internal_port)
    answer = await stage.ask(ASK)
    assert "key-of-" not in f"{answer.headers}{answer.body}"
    stage.gateway.port = internal_port
    for path in ("/fleet", "/health", "/metrics"):
        assert b"key-of-" not in (await stage.ask(None, path)).body


async def test_an_engines_own_refusal_is_relayed_in_openais_form(pair) -> None:
    refusal = {"error": {"message": "too long", "type": "BadRequestError", "code": 400}}
    relayed = {"message": "too long", "type": "invalid_request_error", "param": None, "code": None}

    async def refuse(engine, request, writer):
        engine.send_json(writer, refusal, status=400)

    pair.engines["p"].script = refuse
    response = await pair.ask(ASK)
    assert (response.status, response.json()) == (400, {"error": relayed})
    assert response.headers["content-type"] == "application/json"
    assert not pair.engines["d"].requests
    await pair.until_idle()


async def test_a_refusal_that_quotes_the_handoff_is_rewritten(pair) -> None:
    async def quote(engine, request, writer):
        engine.send_json(writer, {"error": {"message": str(request.body)}}, status=400)

    pair.engines["d"].script = quote
    response = await pair.ask(ASK)
    assert response.status == 400
    assert b"remote" not in response.body
    assert response.error["message"]


async def test_a_stream_that_carries_a_hand_off_is_broken_off(pair) -> None:
    async def leak(engine, request, writer):
        engine.send_stream_head(writer)
        engine.send_chunk(writer, engine.event("one"))
        secret = b'data: {"choices":[],"kv_transfer_params":{"remote_engine_id":"e"}}\n\n'
        for i in range(len(secret)):
            engine.send_chunk(writer, secret[i : i + 1])
            await writer.drain()
            await asyncio.sleep(0)
        await asyncio.sleep(60)

    pair.engines["d"].script = leak
    response = await pair.ask(ASK | {"stream": True})
    assert b"remote_engine_id" not in response.body
    assert "error" in json.loads(response.events[-1].removeprefix(b"data: "))
    await pair.until(lambda: pair.engines["d"].requests[0].cut, "the engine is stopped")


async def test_an_unknown_model_is_not_found(pair) -> None:
    response = await pair.ask(ASK | {"model": "gpt-9"})
    assert (response.status, response.error["code"]) == (404, "model_not_found")
    assert pair.context.metrics.requests == {("", "refused"): 1}


async def test_a_model_whose_fleet_is_away_is_counted_by_its_name(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, ttft_slo_ms=100.0)
    stage.context.router.registry.remove_agent("x")
    for model in ("m", "gpt-9"):
        assert (await stage.ask(ASK | {"model": model})).status == 503
    counted = stage.context.metrics
    assert counted.requests == {("m", "unavailable"): 1, ("", "unavailable"): 1}
    assert counted.slo_results == {("m", "unserved"): 1}


async def test_no_ready_instance_is_unavailable_with_the_reason(make_stage) -> None:
    stage = await make_stage({"d": "decode"})
    stage.state(stage.engines["d"], state=1, reason="loads")
    response = await stage.ask(ASK)
    assert response.status == 503
    assert response.headers["retry-after"] == "1"
    assert "d (decode): starting" in response.error["message"]


async def test_when_all_are_momentarily_away_the_client_may_come_back(make_stage) -> None:
    stage = await make_stage({"p": "prefill", "d": "decode"})
    registry = stage.context.router.registry
    registry.instances["p"].last_event_at = 0.0
    registry.update_connectivity(11.0)
    registry.on_disconnect("d")
    response = await stage.ask(ASK)
    assert (response.status, response.headers["retry-after"]) == (503, "1")
    message = response.error["message"]
    assert "d (decode): connection lost; p (prefill): silent" in message
    health = (await stage.ask(None, "/health")).json()
    contacts = {i["name"]: i["contact"] for i in health["models"]["m"]["instances"]}
    assert contacts == {"p": "silent", "d": "connection lost"}
    stage.state(stage.engines["d"])
    assert (await stage.ask(ASK)).status == 200


async def test_more_waiting_requests_than_allowed_are_shed(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, queue_limit=2)
    opened = stage.hold()
    waiting = [asyncio.create_task(stage.ask(ASK)) for _ in range(2)]
    await stage.until(lambda: len(stage.engines["x"].requests) == 2, "both wait in the engine")
    shed = await stage.ask(ASK)
    assert (shed.status, shed.error["code"]) == (429, "queue_full")
    assert shed.headers["retry-after"] == "1"
    opened.set()
    assert [r.status for r in await asyncio.gather(*waiting)] == [200, 200]
    assert (await stage.ask(ASK)).status == 200
    await stage.until_idle()


async def test_running_streams_do_not_count_as_waiting(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, queue_limit=1)
    client = await stage.connect()

    async def go_on(engine, request, writer):
        await engine.stream(writer, ["t"] * 10_000, pause_s=0.01)

    stage.engines["x"].script = go_on
    client.send(ASK | {"stream": True})
    await client.read_head()
    await client.read_chunk()
    stage.engines["x"].script = None
    assert (await stage.ask(ASK)).status == 200


async def test_the_prompt_leaves_the_books_with_the_first_token(single) -> None:
    client = await single.connect()
    in_flight = single.context.router.registry.instances["x"].in_flight

    async def go_on(engine, request, writer):
        await engine.stream(writer, ["t"] * 10_000, pause_s=0.01)

    single.engines["x"].script = go_on
    client.send(ASK | {"stream": True})
    await client.read_head()
    await client.read_chunk()
    assert in_flight.prompt.own == 0
    assert in_flight.resident.own > 0
    client.close()
    await single.until_idle()


async def test_a_hundred_mixed_requests_at_once_each_get_their_own_answer(make_stage) -> None:
    stage = await make_stage({"p": "prefill", "d": "decode", "x": "mixed", "d2": "decode"})

    async def echo(engine, request, writer):
        if request.is_prefill:
            await engine.answer(request, writer)
            return
        token = request.body["prompt"]
        if request.body.get("stream"):
            await engine.stream(writer, [token] * 5)
        else:
            engine.send_json(writer, {"choices": [token], "kv_transfer_params": None})

    for engine in stage.engines.values():
        engine.script = echo
    bodies = [
        {"model": "m", "prompt": f"prompt-{i}", "stream": i % 2 == 0, "n": 1 + (i % 3 == 0)}
        for i in range(100)
    ]
    for body, response in zip(bodies, await asyncio.gather(*map(stage.ask, bodies)), strict=True):
        assert response.status == 200
        mentioned = {w for w in response.body.decode().split('"') if w.startswith("prompt-")}
        assert mentioned == {body["prompt"]}
    await stage.until_idle()
