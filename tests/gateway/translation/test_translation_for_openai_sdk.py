"""OpenAI's SDK and its Agents SDK, unmodified, over /v1/responses with P/D apart."""

import json

import agents
import openai
import pytest

from tests.gateway.translation.scripted_chat import answer_or_call, chat

QUESTION = "tell me a story " * 20
TOOL = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
ENDLESS = {"ignore_eos": True}


@pytest.fixture
async def sdk(make_stage):
    """Makes clients of a stage's gateway, which end before it."""
    clients = []

    def make(stage, key: str = "any") -> openai.AsyncOpenAI:
        url = f"http://127.0.0.1:{stage.gateway.port}/v1"
        clients.append(openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0))
        return clients[-1]

    yield make
    for client in clients:
        await client.close()


async def collect(client, **arguments) -> list:
    """The events of a stream; every one has the next number, and the SDK's own type."""
    stream = await client.responses.create(model="m", stream=True, **arguments)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for event in events:
        type(event).model_validate(event.model_dump(mode="json", by_alias=True))
    return events


def describe(response) -> dict:
    """Without times."""
    return response.model_dump(exclude={"created_at", "completed_at"})


async def test_a_response_is_split_and_metered_like_a_chat(fleet, sdk) -> None:
    stage, engines = fleet
    client = sdk(stage)
    arguments = {"input": QUESTION, "max_output_tokens": 24, "temperature": 0}
    whole = await client.responses.create(model="m", extra_body=ENDLESS, **arguments)
    assert (whole.object, whole.status, whole.model) == ("response", "incomplete", "m")
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage.output_tokens == 24
    assert whole.usage.total_tokens == whole.usage.input_tokens + 24
    assert (whole.temperature, whole.max_output_tokens) == (0, 24)
    assert whole.model_dump()["store"] is False
    events = await collect(client, extra_body=ENDLESS, **arguments)
    final = events[-1].response
    assert events[-1].type == "response.incomplete"
    assert final.output_text == whole.output_text
    assert final.usage == whole.usage
    assert "".join(e.delta for e in events if e.type.endswith(".delta")) == whole.output_text
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
    arguments = {"input": QUESTION, "max_output_tokens": 24, "temperature": 0.7}
    expected = (await collect(client, extra_body=ENDLESS, **arguments))[-1].response
    async with one_loss(stage, engines, lost_after):
        final = (await collect(client, extra_body=ENDLESS, **arguments))[-1].response
    assert final.output_text == expected.output_text
    assert final.usage == expected.usage
    await stage.until_idle()


@pytest.mark.parametrize("drop_after", [None, 1, 2, 3, 5, 7])
async def test_reasoning_text_and_calls_are_streamed_also_over_a_loss(
    make_stage, sdk, drop_after: int | None
) -> None:
    stage = await make_stage({"p": "prefill", "p2": "prefill", "d": "decode", "d2": "decode"})
    script = chat(answer_or_call, drop_after)
    for engine in stage.engines.values():
        engine.script = script
    client = sdk(stage)
    arguments = {"tools": [TOOL], "temperature": 0, "instructions": "be kind"}
    events = await collect(client, input=QUESTION, **arguments)
    added, done = ["output_item.added", "content_part.added"], "output_item.done"
    expected = ["created", "in_progress"]
    for kind in ("reasoning_text", "output_text"):
        parts = [f"{kind}.delta", f"{kind}.delta", f"{kind}.done", "content_part.done"]
        expected += [*added, *parts, done]
    call = "function_call_arguments"
    expected += ["output_item.added", f"{call}.delta", f"{call}.delta", f"{call}.done", done]
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds == [*expected, "completed"]
    final = events[-1].response
    reasoning, message, function_call = final.output
    assert reasoning.content[0].text == "let me see"
    assert message.content[0].text == "I will look."
    assert (function_call.name, function_call.call_id) == ("weather", "call-0")
    assert json.loads(function_call.arguments) == {"city": "Ulm"}
    assert (final.usage.input_tokens, final.usage.output_tokens) == (20, 9)
    assert (final.instructions, final.tools[0].name) == ("be kind", "weather")
    whole = await client.responses.create(model="m", input=QUESTION, **arguments)
    assert describe(whole) == describe(final)
    result = {"type": "function_call_output", "call_id": "call-0", "output": "sun"}
    turns = [{"role": "user", "content": QUESTION}, *final.output, result]
    last = await client.responses.create(model="m", input=turns, **arguments)
    assert (last.output_text, last.status) == ("It is sunny.", "completed")
    sent = stage.engines["d"].requests + stage.engines["d2"].requests
    chats = [request.body["messages"] for request in sent if len(request.body["messages"]) > 2]
    arguments_text = '{"city": "Ulm"}'
    call_sent = {"name": "weather", "arguments": arguments_text}
    assert chats[-1][2] == {
        "role": "assistant", "reasoning": "let me see", "content": "I will look.",
        "tool_calls": [{"id": "call-0", "type": "function", "function": call_sent}],
    }  # fmt: skip
    if drop_after is not None:
        assert sum(stage.context.metrics.retries.values()) == 1
    await stage.until_idle()


@pytest.mark.parametrize("is_streamed", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("drop_after", [None, 4])
async def test_an_agent_of_the_agents_sdk_calls_its_tool(
    make_stage, sdk, is_streamed: bool, drop_after: int | None
) -> None:
    stage = await make_stage({"p": "prefill", "p2": "prefill", "d": "decode", "d2": "decode"})
    script = chat(answer_or_call, drop_after if is_streamed else None)
    for engine in stage.engines.values():
        engine.script = script
    cities = []

    @agents.function_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        cities.append(city)
        return "sun"

    agents.set_tracing_disabled(True)
    agent = agents.Agent(
        name="guide",
        instructions="be kind",
        model=agents.OpenAIResponsesModel("m", sdk(stage)),
        model_settings=agents.ModelSettings(temperature=0, store=True),
        tools=[weather],
    )
    if is_streamed:
        streamed = agents.Runner.run_streamed(agent, QUESTION)
        async for _ in streamed.stream_events():
            pass
        output = streamed.final_output
    else:
        output = (await agents.Runner.run(agent, QUESTION)).final_output
    assert (output, cities) == ("It is sunny.", ["Ulm"])
    await stage.until_idle()


async def test_a_stream_that_cannot_go_on_ends_as_failed(make_stage, sdk) -> None:
    stage = await make_stage({"x": "mixed"}, resume_s=0.2)
    stage.engines["x"].script = chat(answer_or_call, 4)
    events = await collect(sdk(stage), input=QUESTION, tools=[TOOL], temperature=0.7)
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "server_error"
    assert "could have been resumed" in events[-1].response.error.message
    assert events[-1].response.output[-1].status == "incomplete"
    await stage.until_idle()


async def test_the_sdk_raises_its_own_errors(make_stage, sdk, tmp_path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret-of-responses\n")
    stage = await make_stage({"x": "mixed"}, api_keys=keys)
    with pytest.raises(openai.AuthenticationError):
        await sdk(stage, "wrong").responses.create(model="m", input="a")
    client = sdk(stage, "secret-of-responses")
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.responses.create(model="none", input="a")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="nothing is stored") as bad:
        await client.responses.create(model="m", input="a", previous_response_id="resp_1")
    assert bad.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError) as bad_value:
        await client.responses.create(model="m", input="a", max_output_tokens=0)
    assert bad_value.value.param == "max_output_tokens"
