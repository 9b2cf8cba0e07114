"""Anthropic's SDK, unmodified, against a gateway whose prefill and decode engines are apart."""

import anthropic
import pytest

from cleave.rpc.v1 import agent_pb2

from tests.gateway.translation.scripted_chat import answer_or_call, chat

TOOL = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
QUESTION = [{"role": "user", "content": "tell me a story " * 20}]
GREEDY = {"temperature": 0}


@pytest.fixture
async def sdk(make_stage):
    """Makes clients of a stage's gateway, which end before it."""
    clients = []

    def make(stage, key: str = "any") -> anthropic.AsyncAnthropic:
        url = f"http://127.0.0.1:{stage.gateway.port}"
        clients.append(anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0))
        return clients[-1]

    yield make
    for client in clients:
        await client.close()


def describe(message: anthropic.types.Message) -> dict:
    """Without what the SDK adds to the blocks of streams."""
    fields = message.model_dump()
    for block in fields["content"]:
        block.pop("parsed_output", None)
    return fields


async def collect(manager) -> tuple[list, anthropic.types.Message]:
    async with manager as stream:
        events = [event async for event in stream]
        return events, await stream.get_final_message()


async def test_a_message_is_split_and_metered_like_a_chat(fleet, sdk) -> None:
    stage, engines = fleet
    client = sdk(stage)
    whole = await client.messages.create(
        model="m", max_tokens=24, messages=QUESTION, extra_body=GREEDY | {"ignore_eos": True}
    )
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", "m")
    assert whole.stop_reason == "max_tokens"
    assert (whole.usage.output_tokens, whole.usage.input_tokens > 50) == (24, True)
    _, streamed = await collect(
        client.messages.stream(
            model="m", max_tokens=24, messages=QUESTION, extra_body=GREEDY | {"ignore_eos": True}
        )
    )
    assert streamed.content[0].text == whole.content[0].text
    assert streamed.usage.input_tokens == whole.usage.input_tokens
    assert streamed.usage.output_tokens == 24
    assert streamed.stop_reason == "max_tokens"
    assert sum(engines[name].engine.metrics.generation_tokens for name in ("d1", "d2")) == 48
    assert stage.context.metrics.handoffs["used"] == 2
    assert stage.context.metrics.requests == {("m", "ok"): 2}
    await stage.until_idle()


@pytest.mark.parametrize("lost_after", [1, 2, 9, 23])
async def test_a_stream_goes_on_elsewhere_and_the_client_sees_nothing(
    fleet, sdk, one_loss, lost_after: int
) -> None:
    stage, engines = fleet
    client = sdk(stage)

    async def ask() -> anthropic.types.Message:
        _, message = await collect(
            client.messages.stream(
                model="m", max_tokens=24, messages=QUESTION,
                extra_body={"ignore_eos": True, "temperature": 0.7},
            )
        )  # fmt: skip
        return message

    expected = await ask()
    async with one_loss(stage, engines, lost_after):
        message = await ask()
    assert message.content == expected.content
    assert message.usage == expected.usage
    await stage.until_idle()


@pytest.mark.parametrize("drop_after", [None, 1, 2, 3, 5, 7])
async def test_thinking_text_and_tool_calls_are_streamed_also_over_a_loss(
    make_stage, sdk, drop_after: int | None
) -> None:
    stage = await make_stage({"p": "prefill", "p2": "prefill", "d": "decode", "d2": "decode"})
    script = chat(answer_or_call, drop_after)
    for engine in stage.engines.values():
        engine.script = script
    client = sdk(stage)
    arguments = {"model": "m", "max_tokens": 99, "tools": [TOOL], "extra_body": GREEDY}
    events, message = await collect(client.messages.stream(messages=QUESTION, **arguments))
    kinds = [event.type for event in events if "_" in event.type and event.type != "input_json"]
    block = ["content_block_start", "content_block_delta", "content_block_delta"]
    stop = ["content_block_stop"]
    expected = ["message_start", *block, *stop, *block, *stop, *block, *stop]
    assert kinds == [*expected, "message_delta", "message_stop"]
    thinking, text, call = message.content
    assert (thinking.thinking, text.text) == ("let me see", "I will look.")
    assert (call.type, call.id, call.name, call.input) == (
        "tool_use", "call-0", "weather", {"city": "Ulm"},
    )  # fmt: skip
    assert message.stop_reason == "tool_use"
    assert (message.usage.input_tokens, message.usage.output_tokens) == (20, 9)
    whole = await client.messages.create(messages=QUESTION, **arguments)
    assert describe(whole) == describe(message)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sun"}
    turns = [
        *QUESTION,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    last = await client.messages.create(messages=turns, **arguments)
    assert (last.content[0].text, last.stop_reason) == ("It is sunny.", "end_turn")
    if drop_after is not None:
        assert sum(stage.context.metrics.retries.values()) == 1
    await stage.until_idle()


async def test_tokens_are_counted_by_the_engine(fleet, sdk) -> None:
    stage, _ = fleet
    client = sdk(stage)
    count = await client.messages.count_tokens(model="m", messages=QUESTION, system="be kind")
    message = await client.messages.create(
        model="m", max_tokens=1, messages=QUESTION, system="be kind"
    )
    assert count.input_tokens == message.usage.input_tokens


async def test_the_sdk_raises_its_own_errors(make_stage, sdk, tmp_path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret-of-anthropic\n")
    stage = await make_stage({"x": "mixed"}, api_keys=keys)
    arguments = {"model": "m", "max_tokens": 4, "messages": QUESTION}
    with pytest.raises(anthropic.AuthenticationError) as unauthorized:
        await sdk(stage, "wrong").messages.create(**arguments)
    assert unauthorized.value.body["error"]["type"] == "authentication_error"
    client = sdk(stage, "secret-of-anthropic")
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await client.messages.create(**arguments | {"model": "none"})
    assert unknown.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="max_tokens is 0") as bad:
        await client.messages.create(**arguments | {"max_tokens": 0})
    assert bad.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match=r"thinking\.type"):
        await client.messages.create(**arguments, thinking={"type": "deep"})
    stage.state(stage.engines["x"], state=agent_pb2.STATE_DRAINING)
    with pytest.raises(anthropic.APIStatusError) as unavailable:
        await client.messages.create(**arguments)
    assert unavailable.value.body["error"]["type"] == "overloaded_error"


async def test_a_stream_that_cannot_go_on_ends_with_an_error_of_the_sdk(make_stage, sdk) -> None:
    stage = await make_stage({"x": "mixed"}, resume_s=0.2)
    stage.engines["x"].script = chat(answer_or_call, 4)
    with pytest.raises(anthropic.APIStatusError, match="could have been resumed") as broken:
        await collect(
            sdk(stage).messages.stream(model="m", max_tokens=99, messages=QUESTION, tools=[TOOL])
        )
    assert broken.value.body["error"]["type"] == "api_error"
    await stage.until_idle()


async def test_an_engines_refusal_is_raised_as_a_bad_request(fleet, sdk) -> None:
    stage, _ = fleet
    picture = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    with pytest.raises(anthropic.BadRequestError, match="Only text parts are emulated"):
        await sdk(stage).messages.create(
            model="m", max_tokens=4, messages=[{"role": "user", "content": [picture]}]
        )


async def test_an_answer_that_is_begun_by_the_client_goes_on(fleet, sdk) -> None:
    stage, _ = fleet
    turns = [*QUESTION, {"role": "assistant", "content": "Once"}]
    message = await sdk(stage).messages.create(model="m", max_tokens=3, messages=turns)
    assert message.usage.output_tokens <= 3


async def test_limits_of_a_tenant_hold_and_the_answer_is_charged(make_fleet, sdk, tmp_path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("tenants:\n- {name: team, keys: [secret-of-anthropic], tokensPerMinute: 400}\n")
    stage, _ = await make_fleet({"p": "prefill", "d": "decode"}, api_keys=keys)
    client = sdk(stage, "secret-of-anthropic")
    arguments = {"model": "m", "messages": QUESTION, "extra_body": {"ignore_eos": True}}
    await client.messages.create(max_tokens=400, **arguments)
    with pytest.raises(anthropic.RateLimitError) as refusal:
        await client.messages.create(max_tokens=1, **arguments)
    assert refusal.value.body["error"]["type"] == "rate_limit_error"
    assert int(refusal.value.response.headers["retry-after"]) > 0
    await stage.until_idle()


async def test_a_client_that_leaves_ends_its_stream_at_the_engine(make_fleet, sdk) -> None:
    stage, engines = await make_fleet({"p": "prefill", "d": "decode"}, time_scale=1.0)
    arguments = {"model": "m", "max_tokens": 1_500, "messages": QUESTION}
    async with sdk(stage).messages.stream(**arguments, extra_body={"ignore_eos": True}) as stream:
        async for _ in stream.text_stream:
            break
    await stage.until_idle()
    await stage.until(lambda: not engines["d"].engine.num_requests, "the engine has stopped")
    assert stage.context.metrics.requests == {("m", "cancelled"): 1}


async def test_fields_and_paths_of_beta_clients_are_understood(fleet, sdk) -> None:
    stage, _ = fleet
    message = await sdk(stage).beta.messages.create(
        model="m",
        max_tokens=3,
        messages=QUESTION,
        system=[{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}],
        betas=["context-management-2025-06-27"],
        context_management={"edits": []},
        metadata={"user_id": "u"},
        tools=[TOOL | {"cache_control": {"type": "ephemeral"}}],
        extra_body={"ignore_eos": True},
    )
    assert message.usage.output_tokens == 3
