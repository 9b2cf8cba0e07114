"""Requests that no instance can take yet: held for a while, few of them, in vain or not."""

import asyncio

from cleave.rpc.v1 import agent_pb2

ASK = {"model": "m", "prompt": "hello", "max_tokens": 3}
STREAM = ASK | {"stream": True}


async def test_a_request_waits_for_an_instance_that_wakes(make_stage) -> None:
    stage = await make_stage({}, wake_s=10.0)
    client = await stage.connect()
    client.send(ASK)
    await stage.until(lambda: stage.context.metrics.in_flight == 1, "it waits")
    await stage.add("x", "mixed")
    assert (await client.read()).status == 200
    await stage.until_idle()


async def test_a_request_waits_while_the_only_instance_loads(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, wake_s=10.0)
    stage.state(stage.engines["x"], state=agent_pb2.STATE_STARTING)
    client = await stage.connect()
    client.send(STREAM)
    await stage.until(lambda: stage.context.metrics.in_flight == 1, "it waits")
    stage.state(stage.engines["x"])
    response = await client.read()
    assert (response.status, len(response.events)) == (200, 4)
    await stage.until_idle()


async def test_no_more_wait_for_an_instance_than_the_queue_limit(make_stage) -> None:
    stage = await make_stage({}, wake_s=10.0, queue_limit=3)
    clients = [await stage.connect() for _ in range(5)]
    for client in clients:
        client.send(ASK)
    await stage.until(
        lambda: stage.context.metrics.rejections["", "queue_full"] == 2, "two are shed"
    )
    assert stage.context.num_awaiting_first_byte == 3
    await stage.add("x", "mixed")
    responses = [await client.read() for client in clients]
    assert sorted(each.status for each in responses) == [200, 200, 200, 429, 429]
    await stage.until_idle()


async def test_who_leaves_while_waiting_for_an_instance_is_forgotten(make_stage) -> None:
    stage = await make_stage({}, wake_s=10.0)
    client = await stage.connect()
    client.send(ASK)
    await stage.until(lambda: stage.context.metrics.in_flight == 1, "it waits")
    client.close()
    await stage.until_idle()
    engine = await stage.add("x", "mixed")
    await asyncio.sleep(0.6)
    assert not engine.requests


async def test_the_wait_for_an_instance_respects_its_timeout(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, wake_s=0.3)
    stage.state(stage.engines["x"], state=agent_pb2.STATE_STARTING)
    response = await stage.ask(ASK)
    assert (response.status, response.error["code"]) == (503, "no_instance")
    assert "starting" in response.error["message"]
    await stage.until_idle()


async def test_it_does_not_wait_for_an_unknown_model(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, wake_s=60.0)
    assert (await stage.ask(ASK | {"model": "other"})).status == 404


async def test_it_is_ready_as_long_as_it_holds_requests(make_stage) -> None:
    stage = await make_stage({}, wake_s=60.0)
    response = await stage.ask(None, "/health")
    assert response.status == 200
    assert response.json()["reasons"] == ["no instance has registered yet"]
    client = await stage.connect()
    client.send(ASK)
    await stage.until(lambda: stage.context.metrics.in_flight == 1, "it waits")
    assert (await stage.ask(None, "/health")).json()["requests_in_flight"] == 1
    client.close()
    await stage.until_idle()
