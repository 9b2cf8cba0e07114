"""Requests of the tier flex at a real gateway: they fill what is idle, and count apart."""

import asyncio
import json
import random
from collections import Counter

import pytest

from cleave.batch.batch_client import make_client
from cleave.batch.batch_file import check_batch, read_lines
from cleave.batch.batch_run import BatchProgress, BatchRun
from cleave.batch.result_files import ResultFiles
from cleave.gateway.admission.flex_capacity import INITIAL_LIMIT

ASK = {"model": "m", "prompt": "hello", "max_tokens": 3}
FLEX = ASK | {"service_tier": "flex"}
LONG = "word " * 4_000


async def send(stage, *bodies: dict) -> list:
    clients = [await stage.connect() for _ in bodies]
    for client, body in zip(clients, bodies, strict=True):
        client.send(body)
    return clients


async def test_where_all_is_idle_a_request_runs_at_once_and_counts_apart(single) -> None:
    response = await single.ask(FLEX)
    assert response.status == 200
    await single.until_idle()
    metrics = single.context.metrics
    assert metrics.flex_requests == {("m", "ok"): 1}
    assert metrics.flex_tokens["m"] > 0
    assert not metrics.requests
    assert not metrics.models["m"].output_tokens
    assert not single.context.admission.flex.is_active
    assert single.engines["x"].requests[-1].body["service_tier"] == "flex", "engines know the field"


async def test_as_many_run_as_may_and_the_others_follow(single) -> None:
    opened, flex = single.hold(), single.context.admission.flex
    clients = await send(single, *[FLEX] * 10)
    await single.until(lambda: flex.count_waiting() == 10 - INITIAL_LIMIT, "some wait")
    await single.until(lambda: len(single.engines["x"].requests) == INITIAL_LIMIT, "some run")
    assert flex.count_running() == INITIAL_LIMIT
    assert single.context.num_awaiting_first_byte == 0, "they leave places for others"
    await single.until(lambda: single.context.metrics.flex_waiting == 6, "the gauge shows it")
    ordinary = (await send(single, ASK))[0]
    await single.until(lambda: len(single.engines["x"].requests) == 5, "others do not wait")
    opened.set()
    assert (await ordinary.read()).status == 200
    assert [(await client.read()).status for client in clients] == [200] * 10
    await single.until_idle()
    assert not flex.is_active


async def test_none_starts_while_prompts_wait(single) -> None:
    opened, flex = single.hold(), single.context.admission.flex
    (ordinary,) = await send(single, ASK | {"prompt": LONG})
    await single.until(lambda: len(single.engines["x"].requests) == 1, "it runs")
    (client,) = await send(single, FLEX)
    await single.until(lambda: flex.count_waiting() == 1, "it waits")
    opened.set()
    assert (await ordinary.read()).status == 200
    assert (await client.read()).status == 200


async def test_none_starts_while_an_engine_makes_others_wait(single) -> None:
    registry, flex = single.context.router.registry, single.context.admission.flex
    instance = registry.instances["x"]
    instance.load.num_waiting = 2
    (client,) = await send(single, FLEX)
    await single.until(lambda: flex.count_waiting() == 1, "it waits")
    instance.load.num_waiting = 0
    assert (await client.read()).status == 200


async def test_who_waits_too_long_is_refused(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, first_byte_s=0.3)
    stage.context.router.registry.instances["x"].load.num_waiting = 2
    refused = await stage.ask(FLEX)
    assert (refused.status, refused.error["code"]) == (429, "no_idle_capacity")
    assert int(refused.headers["retry-after"]) >= 1
    assert stage.context.metrics.flex_requests == {("m", "shed"): 1}
    await stage.until_idle()


async def test_a_client_that_leaves_gives_back_its_place(single) -> None:
    opened, flex = single.hold(), single.context.admission.flex
    clients = await send(single, *[FLEX] * 5)
    await single.until(lambda: flex.count_waiting() == 1, "one waits")
    for client in clients:
        client.close()
    await single.until_idle()
    assert (flex.count_waiting(), flex.count_running(), flex.is_active) == (0, 0, False)
    opened.set()


async def test_requests_that_the_engine_refuses_let_no_more_run(single) -> None:
    flex, engine = single.context.admission.flex, single.engines["x"]

    async def refuse(engine, request, writer) -> None:
        engine.send_json(writer, {"error": {"message": "max_tokens is too large"}}, 400)

    engine.script = refuse
    clients = await send(single, *[FLEX] * 20)
    assert [(await client.read()).status for client in clients] == [400] * 20
    assert flex._lanes["m"].window.limit == INITIAL_LIMIT
    await single.until_idle()


@pytest.mark.parametrize("is_slow_client", [False, True])
async def test_slow_streams_of_others_halve_the_number(make_stage, is_slow_client) -> None:
    stage = await make_stage({"x": "mixed"}, tpot_slo_ms=0.000_1)
    flex, engine = stage.context.admission.flex, stage.engines["x"]
    opened = stage.hold()
    clients = await send(stage, *[FLEX] * 8)
    await stage.until(lambda: len(engine.requests) == 4, "four run")
    held = stage.hold()
    (ordinary,) = await send(stage, ASK | {"stream": True})
    await stage.until(lambda: len(engine.requests) == 5, "it runs")
    if is_slow_client:
        (request,) = (r for r in stage.context.active_requests if not r._completion.is_flex)
        request.set_paused(True)
        request.set_paused(False)
    held.set()
    assert (await ordinary.read()).status == 200
    assert (flex._lanes["m"].window.limit < INITIAL_LIMIT) is not is_slow_client
    opened.set()
    for client in clients:
        assert (await client.read()).status == 200
    await stage.until_idle()


@pytest.mark.parametrize("tier", ["auto", "default", "priority", None, 7])
async def test_other_tiers_are_ordinary(single, tier) -> None:
    assert (await single.ask(ASK | {"service_tier": tier})).status == 200
    assert not single.context.metrics.flex_requests


async def test_an_unknown_model_is_refused_at_once(single) -> None:
    refused = await single.ask(FLEX | {"model": "other"})
    assert (refused.status, refused.error["code"]) == (404, "model_not_found")
    await single.until_idle()


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/embeddings"])
async def test_other_apis_have_the_tier_as_well(single, path) -> None:
    body = {"model": "m", "input": "hello", "service_tier": "flex"}
    response = await single.ask(body, path)
    assert response.status == 200
    assert single.context.metrics.flex_requests == {("m", "ok"): 1}


async def test_limits_of_a_tenant_hold(make_stage, tmp_path) -> None:
    keys = tmp_path / "keys.yaml"
    key = "a-key-of-16-or-more"
    keys.write_text(f"tenants: [{{name: a, keys: [{key}], maxQueued: 1}}]\n")
    stage = await make_stage({"x": "mixed"}, api_keys=keys)
    stage.context.router.registry.instances["x"].load.num_waiting = 2
    headers = {"Authorization": f"Bearer {key}"}
    first = await stage.connect()
    first.send(FLEX, **headers)
    await stage.until(lambda: stage.context.admission.flex.count_waiting() == 1, "it waits")
    refused = await stage.ask(FLEX, **headers)
    assert (refused.status, refused.error["code"]) == (429, "tenant_queue_full")
    first.close()
    await stage.until_idle()


async def test_a_batch_runs_beside_streams_and_each_request_is_answered_once(
    make_fleet, tmp_path
) -> None:
    stage, _ = await make_fleet({"p": "prefill", "d": "decode"})
    batch = tmp_path / "batch.jsonl"
    lines = [
        {"custom_id": f"c{at}", "url": "/v1/completions", "body": ASK | {"prompt": f"number {at}"}}
        for at in range(60)
    ]
    batch.write_text("".join(json.dumps(line) + "\n" for line in lines))
    progress = BatchProgress(len(check_batch(batch)))
    client = make_client(f"http://127.0.0.1:{stage.gateway.port}", None, 60.0)
    with ResultFiles(tmp_path / "out", tmp_path / "err") as files:
        run = BatchRun(
            read_lines(batch),
            files,
            client.send,
            progress,
            max_running=16,
            rng=random.Random(1),
        )
        running = asyncio.create_task(run.run(60.0))
        streams = [await stage.ask(ASK | {"stream": True}) for _ in range(10)]
        await running
    assert {stream.status for stream in streams} == {200}
    results = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert Counter(each["custom_id"] for each in results) == Counter(f"c{n}" for n in range(60))
    assert all(each["response"]["body"]["usage"]["completion_tokens"] for each in results)
    assert (progress.num_left, progress.num_failed) == (0, 0)
    metrics = stage.context.metrics
    assert (metrics.flex_requests["m", "ok"], metrics.requests["m", "ok"]) == (60, 10)
    assert metrics.handoffs["used"] >= 60, "requests of a batch are split, too"
    await stage.until_idle()
