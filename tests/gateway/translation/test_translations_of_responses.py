"""Requests and answers of the Responses API, translated without a gateway."""

import json
import typing

import openai.types.responses
import pytest
from openai.types.responses import response_create_params

from cleave.gateway.http.errors import GatewayError
from cleave.gateway.translation import responses_request
from cleave.gateway.translation.request_fields import ENGINE_FIELDS, ModelFacts, read_request
from cleave.gateway.translation.responses_answer import ResponsesAnswer
from cleave.gateway.translation.translations import TRANSLATORS
from cleave.time_slices import run_at_once

from tests.gateway.translation.test_translations import RESPONSES

ASK = {"model": "m", "input": "hi"}


def translate(**fields: object) -> dict:
    """The engine's fields for a request."""
    body = json.dumps(ASK | fields).encode()
    translation = run_at_once(TRANSLATORS[b"/v1/responses"](body, ModelFacts()))
    return {name: json.loads(bytes(raw)) for name, raw in translation.completion.fields.items()}


def test_a_text_becomes_a_chat() -> None:
    chat = translate(instructions="be kind", max_output_tokens=7, temperature=0, stream=True)
    assert chat["messages"] == [
        {"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"},
    ]  # fmt: skip
    assert (chat["max_completion_tokens"], chat["temperature"]) == (7, 0)
    assert chat["stream_options"] == {"include_usage": True}


def test_items_of_one_turn_become_one_message() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    said = {"type": "output_text", "text": "I look", "annotations": []}
    chat = translate(
        instructions="be kind",
        input=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [
                {"type": "input_text", "text": "see"},
                {"type": "input_image", "image_url": "http://x/y.png", "detail": "low"},
            ]},
            {"type": "reasoning", "id": "r", "summary": [],
             "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "id": "m", "content": [said]},
            call,
            call | {"call_id": "c2"},
            {"type": "function_call_output", "call_id": "c1", "output": "a tree"},
            {"type": "function_call_output", "call_id": "c2",
             "output": [{"type": "input_text", "text": "a wall"}]},
        ],
    )  # fmt: skip
    function = {"name": "look", "arguments": "{}"}
    image = {"url": "http://x/y.png", "detail": "low"}
    assert chat["messages"] == [
        {"role": "system", "content": "be kind\n\nbe brief"},
        {"role": "user", "content": [
            {"type": "text", "text": "see"}, {"type": "image_url", "image_url": image},
        ]},
        {"role": "assistant", "reasoning": "hm", "content": "I look", "tool_calls": [
            {"id": "c1", "type": "function", "function": function},
            {"id": "c2", "type": "function", "function": function},
        ]},
        {"role": "tool", "tool_call_id": "c1", "content": "a tree"},
        {"role": "tool", "tool_call_id": "c2", "content": "a wall"},
    ]  # fmt: skip


def test_reasoning_after_a_text_begins_another_turn() -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    said = {"role": "assistant", "content": "a"}
    chat = translate(input=[said, thought, said, {"role": "user", "content": "b"}])
    assert chat["messages"][:2] == [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "reasoning": "hm", "content": "a"},
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("required", "required"),
        ({"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_functions_and_their_choice(given: object, expected: object) -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    chat = translate(tools=[tool], tool_choice=given, parallel_tool_calls=False)
    function = {"name": "f", "parameters": {"type": "object"}, "strict": True}
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert (chat["tool_choice"], chat["parallel_tool_calls"]) == (expected, False)


def test_effort_and_format() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    chat = translate(reasoning={"effort": "high"}, text={"format": form})
    assert chat["reasoning_effort"] == "high"
    schema = {"name": "n", "schema": {"type": "object"}, "strict": True}
    assert chat["response_format"] == {"type": "json_schema", "json_schema": schema}
    chat = translate(text={"format": {"type": "json_object"}})
    assert chat["response_format"] == {"type": "json_object"}
    assert "response_format" not in translate(text={"format": {"type": "text"}})


def test_every_parameter_of_the_sdk_is_known() -> None:
    hints = typing.get_type_hints(response_create_params.ResponseCreateParamsBase)
    without_effect = {
        "access_programs", "background_options", "context_management", "image", "max_tool_calls",
        "metadata", "moderation", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "safety_identifier", "store", "stream_options", "top_logprobs",
    }  # fmt: skip
    known = RESPONSES | without_effect | responses_request.REFUSED.keys() | ENGINE_FIELDS
    assert hints.keys() <= known


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "critic", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "content[0].type"),
        ({"input": [{"role": "user", "content": [
            {"type": "input_image", "file_id": "f"}]}]}, "content[0].image_url"),
        ({"input": [{"role": "system", "content": [
            {"type": "input_image", "image_url": "u"}]}]}, "content[0].type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": "7"}, "max_output_tokens"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"previous_response_id": "r"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type"),
        ({"input": [{"type": "local_shell_call", "call_id": "c"}]}, "input[0].type"),
        ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        ({"tools": [{"type": "namespace", "tools": [{"type": "function", "name": "f"}]}]},
         "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
         "tools[0].tools[0].name"),
        ({"tools": [{"type": "custom", "name": "n", "format": {"definition": 7}}]},
         "tools[0].format.definition"),
        ({"model": None}, "model"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(fields: dict, path: str) -> None:
    with pytest.raises(GatewayError) as refusal:
        translate(**fields)
    error = refusal.value
    assert error.status == 400
    assert path in str(error.param)
    assert path.partition("[")[0] in error.message or path in error.message


def test_a_whole_answer_is_a_response_of_the_sdk() -> None:
    calls = [{"id": "c1", "function": {"name": "look", "arguments": "{}"}}]
    message = {"content": "I look", "reasoning_content": "hm", "tool_calls": calls}
    usage = {
        "prompt_tokens": 50, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 48},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }  # fmt: skip
    choice = {"message": message, "finish_reason": "tool_calls"}
    chat = {"id": "chatcmpl-1", "created": 5, "model": "m", "usage": usage, "choices": [choice]}
    fields = run_at_once(read_request(json.dumps(ASK | {"metadata": {"a": "b"}}).encode()))
    body = ResponsesAnswer(fields, {}).build_body(json.dumps(chat).encode())
    answer = openai.types.responses.Response.model_validate_json(body)
    assert [item.id for item in answer.output] == ["rs_1_0", "msg_1_1", "fc_1_2"]
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    assert (answer.id, answer.status, answer.created_at) == ("resp_1", "completed", 5)
    assert answer.usage.input_tokens_details.cached_tokens == 48
    assert answer.usage.output_tokens_details.reasoning_tokens == 3
    assert answer.metadata == {"a": "b"}
