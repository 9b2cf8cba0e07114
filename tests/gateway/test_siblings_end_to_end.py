"""Two processes of one gateway, here side by side in one loop: what they share, seen by clients."""

import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from cleave.gateway.shared_state import HEARTBEAT_TIMEOUT_S, SharedGatewayState
from cleave.time_slices import run_at_once

ASK = {"model": "m", "prompt": "hello", "max_tokens": 3}


@pytest.fixture
def make_two(make_stage, tmp_path: Path) -> Iterator[Callable[..., Awaitable[list]]]:
    """Makes both, each on a port of its own so that the test chooses which one it calls."""
    shared_state = SharedGatewayState(2, tmp_path)

    async def make(roles: dict[str, str], **options: object) -> list:
        first = await make_stage(roles, shared_state=shared_state.for_process(0), **options)
        second = await make_stage({}, shared_state=shared_state.for_process(1), **options)
        for engine in first.engines.values():
            second.state(engine)
        return [first, second]

    yield make
    shared_state.close()


async def test_each_sends_its_requests_where_the_other_has_sent_none(make_two) -> None:
    two = await make_two({"x": "mixed", "y": "mixed"})
    first, second = two
    opened = first.hold()
    answers = []
    for number, stage in enumerate((first, second, second, first)):
        client = await stage.connect()
        client.send(ASK)
        answers.append(client)
        await first.until(
            lambda sent=number + 1: sum(len(e.requests) for e in first.engines.values()) == sent,
            "it has arrived",
        )
    assert [len(engine.requests) for engine in first.engines.values()] == [2, 2]
    page = (await second.ask(None, "/health")).json()
    in_flight = [each["requests_in_flight"] for each in page["models"]["m"]["instances"]]
    assert in_flight == [2, 2]
    opened.set()
    for client in answers:
        assert (await client.read()).status == 200


async def test_a_tenants_limit_holds_for_both_together(make_two, tmp_path) -> None:
    keys = tmp_path / "keys.yaml"
    small = {"name": "small", "keys": ["key-of-small-tenant"], "maxConcurrent": 2}
    keys.write_text(f"tenants: {json.dumps([small])}\n")
    two = await make_two({"x": "mixed"}, api_keys=keys)
    first, second = two
    opened = first.hold()
    connections = [await stage.connect() for stage in two]
    for client in connections:
        client.send(ASK, Authorization="Bearer key-of-small-tenant")
    await first.until(lambda: len(first.engines["x"].requests) == 2, "both run")
    for stage in two:
        refused = await stage.ask(ASK, Authorization="Bearer key-of-small-tenant")
        assert refused.error["code"] == "concurrency_limit"
    opened.set()
    for client in connections:
        assert (await client.read()).status == 200
    assert (await second.ask(ASK, Authorization="Bearer key-of-small-tenant")).status == 200


async def test_the_queue_limit_holds_for_both_together(make_two) -> None:
    two = await make_two({"x": "mixed"}, queue_limit=4)
    first, second = two
    opened = first.hold()
    answers = []
    for _ in range(4):
        await first.until(
            lambda: first.context.queue_limit > first.context.num_awaiting_first_byte,
            "there is room",
        )
        answers.append(await first.connect())
        answers[-1].send(ASK)
        await first.until(lambda: len(first.engines["x"].requests) == len(answers), "it waits")
    await first.until(lambda: first.context.queue_limit == 4, "all the room is used")
    await first.until(lambda: second.context.queue_limit == 1, "the other one has heard")
    assert (await first.ask(ASK)).error["code"] == "queue_full"
    opened.set()
    for client in answers:
        assert (await client.read()).status == 200


async def test_every_process_serves_the_metrics_of_both(make_two) -> None:
    two = await make_two({"x": "mixed"})
    for stage in two:
        assert (await stage.ask(ASK)).status == 200
        run_at_once(stage.context.save_counters())
    for stage in two:
        page = (await stage.ask(None, "/metrics")).body.decode()
        counts = [line for line in page.splitlines() if "_requests_total{" in line]
        assert [line.split()[-1] for line in counts if 'outcome="ok"' in line] == ["2.0"]


async def test_a_process_that_is_not_heard_makes_the_gateway_unhealthy(make_two) -> None:
    two = await make_two({"x": "mixed"})
    first, second = two
    assert (await first.ask(None, "/health")).status == 200
    for task in second.gateway._tasks:
        task.cancel()
    now = first.context.clock()
    second.context.shared_state.publish_heartbeat(now - HEARTBEAT_TIMEOUT_S - 1, 0, 0)
    answer = await first.ask(None, "/health")
    assert answer.status == 503
    assert answer.json()["reasons"] == ["process 2 of 2 has had no heartbeat for 11 s"]
