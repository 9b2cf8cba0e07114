"""The witness's own requests to engines."""

import pytest

from cleave.gateway.witness import engine_call
from cleave.gateway.witness.engine_call import EngineCallError


@pytest.fixture
async def target(pair):
    return pair.context.router.registry.instances["d"].target


async def test_requests_carry_the_key_of_the_engine(pair, target) -> None:
    answer = await engine_call.post(pair.context, target, b"/v1/completions", {"a": 1}, b"id", 5)
    assert answer.status == 200

    async def show(engine, request, writer) -> None:
        engine.send(writer, 200, b"a 1")

    pair.engines["d"].script = show
    assert (await engine_call.fetch(pair.context, target, b"/metrics", 5)).body == b"a 1"
    posted, fetched = pair.engines["d"].requests[-2:]
    assert (posted.path, posted.body, fetched.path) == ("/v1/completions", {"a": 1}, "/metrics")
    for request in (posted, fetched):
        assert request.headers["x-cleave-engine-key"] == "key-of-d"


async def test_an_engine_that_does_not_answer_is_given_up_in_time(pair, target) -> None:
    pair.hold()
    with pytest.raises(EngineCallError, match=r"has not answered within 0\.1 s"):
        await engine_call.fetch(pair.context, target, b"/metrics", 0.1)


async def test_an_engine_that_is_gone_is_no_answer(pair, target) -> None:
    await pair.engines["d"].stop()
    with pytest.raises(EngineCallError, match="cannot be reached"):
        await engine_call.fetch(pair.context, target, b"/metrics", 5)
    await pair.engines["d"].start()


async def test_an_answer_is_read_up_to_a_limit(pair, target) -> None:
    async def flood(engine, request, writer) -> None:
        engine.send(writer, 200, b"x" * (engine_call.MAX_ANSWER_BYTES + 1))

    pair.engines["d"].script = flood
    with pytest.raises(EngineCallError, match="too long"):
        await engine_call.fetch(pair.context, target, b"/metrics", 30)
