"""The retries of a model: a share of its requests at a time, and the others in turn."""

import asyncio

from cleave.gateway.upstream.retry_budget import (
    MAX_RETRY_S,
    MIN_CONCURRENT_RETRIES,
    RetryBudget,
)

STREAM = {"model": "m", "prompt": "hello", "max_tokens": 3, "stream": True}
ASK = STREAM | {"stream": False}


def test_few_requests_may_all_be_retried() -> None:
    budget = RetryBudget(0.2, list)
    started = [budget.acquire("m", 0.0) for _ in range(MIN_CONCURRENT_RETRIES + 1)]
    assert started == [True] * MIN_CONCURRENT_RETRIES + [False]
    assert budget.acquire("other", 0.0), "each model has its own budget"


def test_of_many_requests_a_share_may_be_retried() -> None:
    budget = RetryBudget(0.2, lambda: ["m"] * 1_000)
    assert sum(budget.acquire("m", 0.0) for _ in range(1_000)) == 200
    budget.release("m", 0.0)
    assert [budget.acquire("m", 0.1) for _ in range(2)] == [True, False]


def test_a_retry_without_a_first_byte_counts_for_some_seconds() -> None:
    budget = RetryBudget(0.0, list)
    assert all(budget.acquire("m", 0.0) for _ in range(MIN_CONCURRENT_RETRIES))
    assert not budget.acquire("m", MAX_RETRY_S / 2)
    assert budget.acquire("m", MAX_RETRY_S)
    budget.release("m", 0.0)  # has expired: nothing is released
    assert sum(budget.acquire("m", MAX_RETRY_S) for _ in range(20)) == MIN_CONCURRENT_RETRIES - 1


async def test_active_requests_are_counted_by_model(single) -> None:
    opened = single.hold()
    clients = [await single.connect() for _ in range(3)]
    for client in clients:
        client.send(ASK)
    await single.until(lambda: single.context.metrics.in_flight == 3, "they run")
    assert single.context._list_active_models() == ["m"] * 3
    opened.set()
    assert [(await client.read()).status for client in clients] == [200] * 3


async def test_an_engine_that_is_lost_does_not_give_everything_to_the_next_at_once(
    make_stage,
) -> None:
    stage = await make_stage({"x": "mixed"})
    lost, opened = stage.engines["x"], asyncio.Event()

    async def hang_up(engine, request, writer) -> None:
        await opened.wait()
        writer.transport.abort()

    lost.script = hang_up
    clients = [await stage.connect() for _ in range(3 * MIN_CONCURRENT_RETRIES)]
    for client in clients:
        client.send(STREAM)
    await stage.until(lambda: len(lost.requests) == len(clients), "all of them run")
    second = await stage.add("y", "mixed")
    held = asyncio.Event()

    async def wait(engine, request, writer) -> None:
        await held.wait()
        await engine.answer(request, writer)

    second.script = wait
    opened.set()
    await stage.until(lambda: len(second.requests) == MIN_CONCURRENT_RETRIES, "the first ones")
    await asyncio.sleep(0.5)
    assert len(second.requests) == MIN_CONCURRENT_RETRIES
    assert stage.context.metrics.retries_delayed == {"m": 2 * MIN_CONCURRENT_RETRIES}
    held.set()
    assert [(await client.read()).status for client in clients] == [200] * len(clients)
    await stage.until_idle()


async def test_a_retry_that_waits_for_the_budget_too_long_is_given_up(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, resume_s=0.3)

    async def hang_up(engine, request, writer) -> None:
        budget = stage.context.retry_budget
        while budget.acquire("m", stage.context.clock()):
            pass
        writer.transport.abort()

    stage.engines["x"].script = hang_up
    response = await stage.ask(ASK)
    assert (response.status, response.error["code"]) == (502, "engine_error")
    assert len(stage.engines["x"].requests) == 1
    await stage.until_idle()


async def test_requests_that_no_engine_received_need_no_budget(make_stage) -> None:
    stage = await make_stage({"x": "mixed", "y": "mixed"})
    budget = stage.context.retry_budget
    while budget.acquire("m", stage.context.clock()):
        pass
    await stage.engines["x"].stop()
    assert [(await stage.ask(ASK)).status for _ in range(4)] == [200] * 4
    await stage.engines["x"].start()
