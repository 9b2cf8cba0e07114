"""Requests and answers of the Messages API, translated without a gateway."""

import json
import typing
from collections.abc import Sequence

import anthropic.types
import pytest
from anthropic.types import beta

from cleave.gateway.http.errors import GatewayError
from cleave.gateway.translation import messages_request
from cleave.gateway.translation.answer import StreamTranslator
from cleave.gateway.translation.messages_answer import MessagesAnswer
from cleave.gateway.translation.request_fields import ENGINE_FIELDS, MAX_ELEMENTS, ModelFacts
from cleave.gateway.translation.translations import TRANSLATORS
from cleave.time_slices import run_at_once

from tests.gateway.translation.scripted_chat import call_delta
from tests.gateway.translation.test_translations import MESSAGES

ASK = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
PICTURE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}


def translate(path: bytes = b"/v1/messages", **fields: object) -> dict:
    """The engine's fields for a request."""
    body = json.dumps(ASK | fields).encode()
    translation = run_at_once(TRANSLATORS[path](body, ModelFacts()))
    return {name: json.loads(bytes(raw)) for name, raw in translation.completion.fields.items()}


def refuse(**fields: object) -> GatewayError:
    with pytest.raises(GatewayError) as refusal:
        translate(**fields)
    assert refusal.value.status == 400
    return refusal.value


def stream(*deltas: dict, finish: str = "stop", stop: object = None) -> list[dict]:
    """The data of the events for these deltas."""
    frame = {"id": "chatcmpl-1", "model": "m"}
    choices = [{"delta": delta} for delta in deltas]
    choices.append({"delta": {}, "finish_reason": finish, "stop_reason": stop})
    events = [{**frame, "choices": [choice]} for choice in choices]
    data = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events)
    return convert(data + b"data: [DONE]\n\n")


def convert(data: bytes, prompt_tokens: int = 0) -> list[dict]:
    return read_events(StreamTranslator(MessagesAnswer(), lambda: prompt_tokens).convert(data))


def read_events(events: Sequence[bytes]) -> list[dict]:
    joined = b"".join(events)
    pairs = [event.split(b"\ndata: ") for event in joined.split(b"\n\n") if event]
    values = [(name.removeprefix(b"event: ").decode(), json.loads(data)) for name, data in pairs]
    assert all(name == value["type"] for name, value in values)
    return [value for _, value in values]


def test_a_conversation_becomes_a_chat() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": 1.50}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [
        {"type": "text", "text": "seen"}, {"type": "image", "source": PICTURE},
    ]}  # fmt: skip
    chat = translate(
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: 7"},
            {"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look"},
                call,
            ]},
            {"role": "user", "content": [result, {"type": "text", "text": "well?"}]},
        ],
        stop_sequences=["END"],
        stream=True,
        top_k=3,
        metadata={"user_id": {"device": "d"}},
    )  # fmt: skip
    url = {"url": "data:image/png;base64,AAAA"}
    function = {"name": "look", "arguments": '{"at": 1.5}'}
    assert chat["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "I look", "reasoning": "hm", "tool_calls": [
            {"id": "t1", "type": "function", "function": function},
        ]},
        {"role": "tool", "tool_call_id": "t1", "content": "seen"},
        {"role": "user", "content": [
            {"type": "image_url", "image_url": url}, {"type": "text", "text": "well?"},
        ]},
    ]  # fmt: skip
    assert chat["max_completion_tokens"] == 9
    assert (chat["stop"], chat["top_k"], "metadata" in chat) == (["END"], 3, False)
    assert chat["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"type": "tool", "name": "look"},
            {"tool_choice": {"type": "function", "function": {"name": "look"}}},
        ),
    ],
)
def test_tools_become_functions(choice: dict, expected: dict) -> None:
    schema = {"type": "object", "properties": {"at": {"type": "number"}}}
    chat = translate(tools=[{"name": "look", "input_schema": schema}], tool_choice=choice)
    function = {"name": "look", "parameters": schema}
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert chat.items() >= expected.items()


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, None),
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"thinking": {"type": "adaptive"}}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "low"),
        ({"thinking": {"type": "enabled", "budget_tokens": 8192}}, "medium"),
        ({"thinking": {"type": "enabled", "budget_tokens": 32768}}, "high"),
        ({"output_config": {"effort": "max"}, "thinking": {"type": "adaptive"}}, "max"),
        ({"output_config": {"effort": "max"}, "thinking": {"type": "disabled"}}, "none"),
    ],
)
def test_a_budget_of_thinking_becomes_an_effort(fields: dict, effort: str | None) -> None:
    assert translate(**fields).get("reasoning_effort") == effort


def test_a_model_that_always_thinks_thinks_little_when_it_should_not() -> None:
    body = json.dumps(ASK | {"thinking": {"type": "disabled"}}).encode()
    convert = TRANSLATORS[b"/v1/messages"]
    chat = run_at_once(convert(body, ModelFacts((), "m".__eq__))).completion
    assert bytes(chat.fields["reasoning_effort"]) == b'"low"'


def test_a_schema_of_the_answer_becomes_a_response_format() -> None:
    output = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    schema = {"name": "answer", "schema": {"type": "object"}}
    expected = {"type": "json_schema", "json_schema": schema}
    assert translate(output_config=output)["response_format"] == expected


def test_an_answer_that_the_client_has_begun_is_continued() -> None:
    chat = translate(messages=[*ASK["messages"], {"role": "assistant", "content": "Once"}])
    assert chat["continue_final_message"] is True
    assert chat["add_generation_prompt"] is False


def test_every_parameter_of_the_sdk_is_known() -> None:
    without_effect = {
        "betas", "billing_policy", "cache_control", "compaction", "context_management",
        "diagnostics", "fallback_credit_token", "fallbacks", "inference_geo", "service_tier",
        "speed", "user_profile_id", "workspace_id",
    }  # fmt: skip
    known = MESSAGES | without_effect | messages_request.REFUSED.keys() | ENGINE_FIELDS
    for module in (anthropic.types, beta):
        hints = typing.get_type_hints(module.message_create_params.MessageCreateParamsBase)
        assert hints.keys() <= known


FOUND = {
    "type": "search_result", "source": "https://a.example", "title": "Rivers",
    "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
    "citations": {"enabled": True},
}  # fmt: skip
TYPED = {"type": "document", "source": {"type": "content", "content": [
    {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}}  # fmt: skip
SHORT = {"type": "document", "source": {"type": "content", "content": "whole"}}
FILE = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf"}}


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (FOUND, "Rivers\nhttps://a.example\none\ntwo"),
        ({**FOUND, "content": [], "title": None}, "https://a.example"),
        ({**FOUND, "content": "one", "title": ""}, "https://a.example\none"),
        (TYPED, "a\nb"),
        (SHORT, "whole"),
    ],
)
def test_found_texts_and_documents_of_texts_are_texts(block: dict, text: str) -> None:
    question = {"role": "user", "content": [block]}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    sent = translate(messages=[question, {"role": "user", "content": [result]}])["messages"]
    assert [each["content"] for each in sent] == [text, text]
    assert [each["role"] for each in sent] == ["user", "tool"]


@pytest.mark.parametrize("block", [FILE, {"type": "video"}, {"type": "x" * 900, "source": 7}])
def test_what_no_engine_reads_of_a_result_is_named_in_its_place(block: dict) -> None:
    said = {"type": "text", "text": "done"}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [said, block, FOUND]}
    (sent,) = translate(messages=[{"role": "user", "content": [result]}])["messages"]
    assert sent["content"].startswith(f"done\n[{block['type'][:80]} left out]\nRivers\n")


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9a"}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "content[0].type"),
        ({"messages": [{"role": "user", "content": [
            {"type": "document", "source": {"type": "base64"}}]}]}, "source.type"),
        ({"messages": [{"role": "user", "content": [{**FOUND, "content": [{"type": "image"}]}]}]},
         "content[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": [{"type": "image"}]}]}, "[0].type"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking.budget_tokens"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"stream": "yes"}, "stream"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"tools": [{"input_schema": {}}]}, "tools[0]"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name"),
        ({"messages": [{"role": "user", "content": [
            {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "a"}}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "system", "content": [
            {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "a"}}]}]},
         "messages[0].content[0].tool.name"),
        ({"messages": [{"role": "system", "content": [
            {"type": "tool_removal", "tool": {"type": "tool_definition"}}]}]},
         "messages[0].content[0].tool.type"),
        ({"model": None}, "model"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(fields: dict, path: str) -> None:
    error = refuse(**fields)
    assert error.param is not None
    assert path in error.param or path in error.message
    assert error.param.partition("[")[0].partition(".")[0] in error.message


def test_a_handoff_cannot_be_sent_by_a_client() -> None:
    for name in ("kv_transfer_params", "ec_transfer_params", "request_id"):
        assert name not in translate(**{name: {"remote_engine_id": "x"}})
    assert translate(vllm_xargs={"kv_transfer_params": "x", "a": 1})["vllm_xargs"] == {"a": 1}


def test_a_conversation_has_a_bounded_number_of_messages() -> None:
    turn = {"role": "user", "content": ""}
    refusal = refuse(messages=[turn] * (MAX_ELEMENTS + 1))
    assert (refusal.param, f"{MAX_ELEMENTS} elements" in refusal.message) == ("messages", True)


def test_braces_in_texts_are_no_objects() -> None:
    text = "{" * 200_000
    chat = translate(messages=[{"role": "user", "content": text}])
    assert chat["messages"] == [{"role": "user", "content": text}]


def test_whole_numbers_may_be_written_as_engines_take_them() -> None:
    thinking = {"type": "enabled", "budget_tokens": 2000.0}
    for limit in (4096.0, "4096"):
        chat = translate(max_tokens=limit, thinking=thinking)
        assert (chat["max_completion_tokens"], chat["reasoning_effort"]) == (4096, "low")
    assert refuse(max_tokens=4.5).param == "max_tokens"


def test_tokens_are_counted_with_the_tools() -> None:
    counted = translate(b"/v1/messages/count_tokens", tools=[{"name": "look"}], system="be kind")
    assert counted.keys() == {"model", "messages", "tools"}
    assert counted["messages"][0] == {"role": "system", "content": "be kind"}


def test_tokens_are_counted_with_the_effort_of_thinking() -> None:
    def count(**fields: object) -> object:
        return translate(b"/v1/messages/count_tokens", **fields).get("chat_template_kwargs")

    disabled, budget = {"type": "disabled"}, {"type": "enabled", "budget_tokens": 2_000}
    assert count() is None
    assert count(thinking={"type": "adaptive"}, chat_template_kwargs={"a": 1}) == {"a": 1}
    assert count(thinking=disabled) == {"enable_thinking": False, "reasoning_effort": "none"}
    assert count(thinking=budget) == {"enable_thinking": True, "reasoning_effort": "low"}
    # As in a chat: a client's own switch counts, its own effort gives way.
    own = {"a": 1, "enable_thinking": True, "reasoning_effort": "max"}
    assert count(thinking=disabled, chat_template_kwargs=own) == own | {"reasoning_effort": "none"}
    assert count(output_config={"effort": "high"})["reasoning_effort"] == "high"


def test_parallel_calls_are_blocks_one_after_the_other() -> None:
    deltas = (
        call_delta("look", "{}"), call_delta("hear", "", 1), call_delta(None, '{"at":', 1),
        call_delta(None, "2}", 1),
    )  # fmt: skip
    events = stream(*deltas, finish="tool_calls")
    blocks = [event["content_block"] for event in events if "content_block" in event]
    assert [(block["name"], block["id"]) for block in blocks] == [
        ("look", "call-0"), ("hear", "call-1"),
    ]  # fmt: skip
    parts = [e["delta"]["partial_json"] for e in events if e["type"] == "content_block_delta"]
    assert parts == ["{}", '{"at":', "2}"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_calls_that_are_mixed_end_the_stream_with_an_error() -> None:
    mixed = call_delta("look", ""), call_delta("hear", "", 1), call_delta(None, "{}", 0)
    events = stream(*mixed)
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "api_error"


def test_an_engine_whose_events_cannot_be_read_ends_the_stream_with_an_error() -> None:
    translator = StreamTranslator(MessagesAnswer(), int)
    events = read_events(translator.convert(b"data: {\n\ndata: [DONE]\n\n"))
    assert [event["type"] for event in events] == ["error"]
    assert not translator.convert(b"data: [DONE]\n\n")


def test_an_answer_without_a_token_is_a_message_too() -> None:
    events = convert(b"data: [DONE]\n\n")
    assert [event["type"] for event in events] == [
        "message_start", "content_block_start", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    assert events[1]["content_block"] == {"type": "text", "text": ""}
    empty = {"id": "chatcmpl-1", "model": "m", "choices": [{"message": {"content": None}}]}
    body = json.loads(MessagesAnswer().build_body(json.dumps(empty).encode()))
    assert body["content"] == [{"type": "text", "text": ""}]


def test_a_message_starts_with_the_tokens_of_its_prompt() -> None:
    event = {"id": "chatcmpl-1", "model": "m", "choices": [{"delta": {"role": "assistant"}}]}
    (start,) = convert(b"data: %b\n\n" % json.dumps(event).encode(), prompt_tokens=31)
    assert start["message"]["usage"]["input_tokens"] == 31
    event["usage"] = {"prompt_tokens": 32}
    (start,) = convert(b"data: %b\n\n" % json.dumps(event).encode(), prompt_tokens=31)
    assert start["message"]["usage"]["input_tokens"] == 32


def test_a_comment_of_a_stream_stays_one() -> None:
    translator = StreamTranslator(MessagesAnswer(), int)
    assert b"".join(translator.convert(b": keep-alive\n\n")) == b": keep-alive\n\n"
    assert b"message_stop" in b"".join(translator.convert(b"data: [DONE]\n\n"))


@pytest.mark.parametrize(
    ("finish", "stop", "reason", "sequence"),
    [
        ("stop", None, "end_turn", None),
        ("stop", 151_645, "end_turn", None),
        ("stop", "END", "stop_sequence", "END"),
        ("length", None, "max_tokens", None),
        ("tool_calls", None, "tool_use", None),
        ("content_filter", None, "refusal", None),
    ],
)
def test_reasons_of_the_end(finish: str, stop: object, reason: str, sequence: str | None) -> None:
    ending = stream({"content": "a"}, finish=finish, stop=stop)[-2]["delta"]
    assert (ending["stop_reason"], ending["stop_sequence"]) == (reason, sequence)


def test_a_whole_answer_is_a_message_of_the_sdk() -> None:
    calls = [
        {"id": "t1", "function": {"name": "look", "arguments": '{"at": 2}'}},
        {"id": "t2", "function": {"name": "look", "arguments": '{"at": '}},
    ]
    message = {"content": "I look", "reasoning_content": "hm", "tool_calls": calls}
    usage = {
        "prompt_tokens": 50, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 48},
    }  # fmt: skip
    chat = {
        "id": "chatcmpl-1", "model": "m", "usage": usage,
        "choices": [{"message": message, "finish_reason": "length"}],
    }  # fmt: skip
    body = MessagesAnswer().build_body(json.dumps(chat).encode())
    answer = anthropic.types.Message.model_validate_json(body)
    thinking, text, call, cut = answer.content
    assert (thinking.thinking, text.text, call.input) == ("hm", "I look", {"at": 2})
    assert (cut.type, cut.text) == ("text", '{"at": '), "a call that was cut short cannot run"
    assert (answer.id, answer.stop_reason) == ("msg_1", "max_tokens")
    assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens) == (2, 48)
