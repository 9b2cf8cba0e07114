from collections.abc import Awaitable, Callable

import pytest

from cleave.profiling.client import OpenAIClient
from cleave.profiling.engine_info import count_requests, inspect_engine, read_counters
from cleave.profiling.errors import ProfilingError


async def test_the_facts_of_an_engine_are_read(serve: Callable[..., Awaitable]) -> None:
    running = await serve()
    facts = await inspect_engine(OpenAIClient(running.url), None)
    assert (facts.model, facts.source, facts.engine) == ("m", "opt-13b", "emulated")
    assert (facts.max_model_len, facts.kv_block_size) == (2048, 16)
    assert facts.kv_capacity_tokens == running.engine.scheduler.pool.num_blocks * 16


async def test_a_model_that_is_not_served_is_named(serve: Callable[..., Awaitable]) -> None:
    running = await serve()
    with pytest.raises(ProfilingError, match="serves m: there is no 'other'"):
        await inspect_engine(OpenAIClient(running.url), "other")


async def test_counters_wait_until_the_request_is_counted(
    serve: Callable[..., Awaitable],
) -> None:
    running = await serve()
    client = OpenAIClient(running.url, "m")
    before = await read_counters(client)
    await client.complete([9] * 600, 1)
    after = await read_counters(client, before.prefills + 1)
    assert after.prefills - before.prefills == 1
    assert after.iterations - before.iterations == 2, "600 tokens are two passes of up to 512"
    assert after.prefill_s > before.prefill_s
    assert await count_requests(client) == 0


async def test_a_gateway_is_not_measured_as_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(*_: object) -> dict[str, object]:
        return {"data": [{"id": "m", "owned_by": "cleave"}]}

    monkeypatch.setattr(OpenAIClient, "get_json", answer)
    with pytest.raises(ProfilingError, match="is a gateway of Cleave: give the URL of one of its"):
        await inspect_engine(OpenAIClient("http://127.0.0.1:1"), None)
