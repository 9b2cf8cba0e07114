"""Requests in the form in which Codex and Claude Code send them, translated without a gateway."""

import json

import openai.types.responses
import pytest

from cleave.gateway.http.errors import GatewayError
from cleave.gateway.translation.answer import StreamTranslator
from cleave.gateway.translation.request_fields import MAX_TOOLS, ModelFacts
from cleave.gateway.translation.translations import TRANSLATORS, Translation
from cleave.time_slices import run_at_once

from tests.gateway.translation.scripted_chat import call_delta

OBJECT = {"type": "object", "properties": {}}
GRAMMAR = 'start: "begin" LINE+ "end"'
OBJECT_OF_SHELL = {"type": "object", "properties": {"command": {"type": "array"}}}
SHELL = {
    "type": "function", "name": "shell", "description": "Runs a command.", "strict": False,
    "parameters": OBJECT_OF_SHELL,
}  # fmt: skip
CODEX = {
    "model": "m",
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [
            {"type": "input_text", "text": "<permissions>read</permissions>"}]},
        {"type": "message", "role": "user", "content": [
            {"type": "input_text", "text": "Fix it."}], "phase": None},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None,
         "encrypted_content": "AAAA"},
        {"type": "function_call", "id": "fc_1", "name": "shell", "call_id": "c1",
         "arguments": "{\"command\":[\"ls\"]}", "status": "completed"},
        {"type": "function_call", "name": "look", "namespace": "mcp__docs", "call_id": "c2",
         "arguments": "{}"},
        {"type": "custom_tool_call", "id": "ctc_1", "status": "completed", "call_id": "c3",
         "name": "apply_patch", "input": "begin\n\"a\"\nend"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed",
         "action": {"type": "search", "query": "q"}},
        {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
        {"type": "function_call_output", "call_id": "c2", "output": [
            {"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]},
        {"type": "custom_tool_call_output", "call_id": "c3", "output": "Done"},
        {"type": "function_call_output", "call_id": "c4", "output": [
            {"type": "input_image", "image_url": "data:image/png;base64,AA",
             "detail": "original"}]},
    ],
    "tools": [
        SHELL,
        {"type": "custom", "name": "apply_patch", "description": "Edits files.",
         "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR}},
        {"type": "namespace", "name": "mcp__docs", "description": "d", "tools": [
            {"type": "function", "name": "look", "parameters": OBJECT, "defer_loading": True},
            {"type": "custom", "name": "unseen"}]},
        {"type": "web_search", "external_web_access": False},
        {"type": "local_shell"}, {"type": "tool_search", "execution": "client"},
        {"type": "image_generation", "output_format": "png"},
        {"type": "mcp", "server_label": "s", "server_url": "https://x"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
    "prompt_cache_key": "k",
    "text": {"verbosity": "low"},
    "truncation": "auto",
    "service_tier": "priority",
    "client_metadata": {"x-codex-installation-id": "0"},
    "a_field_of_next_year": {"kv_transfer_params": {"remote_engine_id": "x"}},
}  # fmt: skip

FIND = {"name": "ToolSearch", "description": "Finds tools.", "input_schema": OBJECT}
LOOK = {"name": "look", "input_schema": OBJECT, "defer_loading": True}
CLAUDE_CODE = {
    "model": "m",
    "max_tokens": 32_000,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=00;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "<system-reminder>be brief</system-reminder>"},
            {"type": "text", "text": "Fix it.", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "tool_use", "id": "t1", "name": "ToolSearch", "input": {}, "caller": None}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [
            {"type": "tool_reference", "tool_name": "look"}]}]},
        {"role": "system", "content": [{"type": "text", "text": "The file has changed."}]},
        {"role": "user", "content": "Go on."},
    ],
    "tools": [FIND, LOOK | {"eager_input_streaming": True}],
    "metadata": {"user_id": "{\"device_id\":\"0\",\"session_id\":\"1\"}"},
    "thinking": {"type": "adaptive", "display": "summarized"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "mcp_servers": [], "betas": ["a"], "container": "", "temperature": 1, "stream": True,
    "a_field_of_next_year": True,
}  # fmt: skip


def translate(path: bytes, body: dict, **fields: object) -> Translation:
    return run_at_once(TRANSLATORS[path](json.dumps(body | fields).encode(), ModelFacts()))


def read(translation: Translation) -> dict:
    """The engine's fields."""
    return {name: json.loads(bytes(raw)) for name, raw in translation.completion.fields.items()}


def ask_codex(**fields: object) -> dict:
    return read(translate(b"/v1/responses", CODEX, **fields))


def ask_claude(**fields: object) -> dict:
    return read(translate(b"/v1/messages", CLAUDE_CODE, **fields))


def make_call(call_id: str, name: str, arguments: str) -> dict:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def test_a_turn_of_codex_becomes_a_chat() -> None:
    chat = ask_codex()
    image = {"url": "data:image/png;base64,AA"}
    assert chat["messages"] == [
        {"role": "system",
         "content": "You are a coding agent.\n\n<permissions>read</permissions>"},
        {"role": "user", "content": "Fix it."},
        {"role": "assistant", "reasoning": "", "tool_calls": [
            make_call("c1", "shell", '{"command":["ls"]}'),
            make_call("c2", "mcp__docs__look", "{}"),
            make_call("c3", "apply_patch", '{"input": "begin\\n\\"a\\"\\nend"}')]},
        {"role": "tool", "tool_call_id": "c1", "content": "a.py"},
        {"role": "tool", "tool_call_id": "c2", "content": "onetwo"},
        {"role": "tool", "tool_call_id": "c3", "content": "Done"},
        {"role": "tool", "tool_call_id": "c4",
         "content": [{"type": "image_url", "image_url": image}]},
    ]  # fmt: skip
    assert chat["truncate_prompt_tokens"] == -1
    known = {
        "model", "messages", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort",
        "stream", "stream_options", "service_tier", "truncate_prompt_tokens", "return_token_ids",
    }  # fmt: skip
    assert chat.keys() == known, "nothing else reaches the engine"


def test_tools_of_codex_become_functions_and_hosted_ones_are_left_out() -> None:
    shell, patch, look = (tool["function"] for tool in ask_codex()["tools"])
    assert shell == {key: SHELL[key] for key in ("name", "parameters", "description", "strict")}
    assert (patch["name"], patch["parameters"]["required"]) == ("apply_patch", ["input"])
    assert patch["description"].startswith("Edits files.")
    assert patch["description"].endswith(GRAMMAR)
    assert look == {"name": "mcp__docs__look", "parameters": OBJECT, "defer_loading": True}
    hosted = [{"type": "web_search"}, {"type": "a_kind_of_next_year", "x": {}}]
    assert "tools" not in ask_codex(tools=hosted)


def test_tools_that_a_search_has_found_are_loaded() -> None:
    found = {"type": "tool_search_output", "call_id": "s", "status": "completed", "tools": [
        {"type": "namespace", "name": "mcp__docs", "tools": [
            {"type": "function", "name": "look", "parameters": OBJECT}]}]}  # fmt: skip
    call = {"type": "tool_search_call", "call_id": "s", "arguments": {"query": "q"}}
    chat = ask_codex(input=[*CODEX["input"], call, found])
    assert chat["tools"][-1]["function"] == {"name": "mcp__docs__look", "parameters": OBJECT}
    assert len(chat["tools"]) == 3


@pytest.mark.parametrize(
    ("choice", "chosen", "names"),
    [
        ({"type": "custom", "name": "apply_patch"}, "apply_patch", 3),
        ({"type": "function", "name": "look"}, "mcp__docs__look", 3),
        ({"type": "function", "name": "mcp__docs__look"}, "mcp__docs__look", 3),
        ({"type": "allowed_tools", "mode": "required",
          "tools": [{"type": "function", "name": "shell"}]}, "required", 1),
        ({"type": "allowed_tools", "mode": "auto",
          "tools": [{"type": "namespace", "name": "mcp__docs"}, {"type": "mcp"}]}, "auto", 1),
        ({"type": "web_search"}, "auto", 3),
        ("none", "none", 3),
    ],
)  # fmt: skip
def test_a_choice_of_tools_names_them_as_the_client_did(
    choice: object, chosen: str, names: int
) -> None:
    chat = ask_codex(tool_choice=choice)
    got = chat["tool_choice"]
    assert chosen == (got if isinstance(got, str) else got["function"]["name"])
    assert len(chat["tools"]) == names


def stream(translation: Translation, *deltas: dict) -> list[dict]:
    """The data of the events for these deltas."""
    events = [{"id": "chatcmpl-1", "model": "m", "choices": [{"delta": each}]} for each in deltas]
    data = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events)
    pieces = StreamTranslator(translation.answer, int).convert(data + b"data: [DONE]\n\n")
    translated = b"".join(pieces)
    return [json.loads(event.split(b"\ndata: ")[1]) for event in translated.split(b"\n\n") if event]


def test_calls_come_back_under_the_names_of_codex() -> None:
    deltas = [
        call_delta("mcp__docs__look", "{}"),
        call_delta("apply_patch", '{"input": "beg', 1), call_delta(None, 'in\\nend"}', 1),
        call_delta("shell", "{}", 2),
    ]  # fmt: skip
    events = stream(translate(b"/v1/responses", CODEX), *deltas)
    answer = openai.types.responses.Response.model_validate(events[-1]["response"])
    look, patch, shell = answer.output
    assert (look.type, look.name, look.namespace) == ("function_call", "look", "mcp__docs")
    assert (patch.type, patch.name) == ("custom_tool_call", "apply_patch")
    assert patch.input == "begin\nend"
    assert (shell.name, shell.namespace) == ("shell", None)
    delta, done = (e for e in events if e["type"].startswith("response.custom_tool_call_input"))
    assert (delta["delta"], done["input"]) == (patch.input, patch.input)
    numbers = [event["sequence_number"] for event in events]
    assert numbers == list(range(len(events)))


def test_a_whole_answer_has_the_names_of_codex_too() -> None:
    calls = [
        make_call("c1", "mcp__docs__look", "{}"), make_call("c2", "apply_patch", '{"input": "a"}'),
        make_call("c3", "apply_patch", "no JSON"),
    ]  # fmt: skip
    chat = {"id": "chatcmpl-1", "model": "m", "choices": [{"message": {"tool_calls": calls}}]}
    body = translate(b"/v1/responses", CODEX).answer.build_body(json.dumps(chat).encode())
    look, patch, odd = json.loads(body)["output"]
    assert (look["name"], look["namespace"], look["id"]) == ("look", "mcp__docs", "fc_1_0")
    assert (patch["type"], patch["input"], patch["id"]) == ("custom_tool_call", "a", "ctc_1_1")
    assert odd["input"] == "no JSON"


def test_a_message_that_was_cut_short_is_continued() -> None:
    begun = {"type": "message", "role": "assistant", "content": "Once", "status": "incomplete"}
    chat = ask_codex(input=[*CODEX["input"], begun])
    assert chat["continue_final_message"] is True
    assert "continue_final_message" not in ask_codex(input=[begun, *CODEX["input"]])


def test_a_turn_of_claude_code_becomes_a_chat() -> None:
    chat = ask_claude()
    assert chat["messages"] == [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": [
            {"type": "text", "text": "<system-reminder>be brief</system-reminder>"},
            {"type": "text", "text": "Fix it."}]},
        {"role": "assistant", "reasoning": "hm", "tool_calls": [
            make_call("t1", "ToolSearch", "{}")]},
        {"role": "tool", "tool_call_id": "t1", "content": ""},
        {"role": "tool", "tool_call_id": "t1",
         "content": [{"type": "tool_reference", "name": "look"}]},
        {"role": "system", "content": "The file has changed."},
        {"role": "user", "content": "Go on."},
    ]  # fmt: skip
    find, look = (tool["function"] for tool in chat["tools"])
    assert "defer_loading" not in find
    assert look["defer_loading"] is True
    known = {
        "model", "messages", "tools", "max_completion_tokens", "reasoning_effort", "temperature",
        "stream", "stream_options", "return_token_ids",
    }  # fmt: skip
    assert chat.keys() == known, "nothing else reaches the engine"


def test_tools_that_are_added_are_no_longer_deferred_and_removed_ones_are_gone() -> None:
    def change(kind: str, tool: dict) -> dict:
        return {"role": "system", "content": [{"type": kind, "tool": tool}]}

    other = {"name": "other", "input_schema": OBJECT}
    changes = [
        change("tool_addition", {"type": "tool_reference", "name": "look"}),
        change("tool_addition", {"type": "tool_definition", "definition": other}),
        change("tool_removal", {"type": "tool_reference", "name": "ToolSearch"}),
    ]
    chat = ask_claude(messages=[*CLAUDE_CODE["messages"], *changes])
    assert chat["tools"] == [
        {"type": "function", "function": {"name": name, "parameters": OBJECT}}
        for name in ("look", "other")
    ]
    assert chat["messages"] == ask_claude()["messages"], "no message is made of them"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x-anthropic-billing-header: a\nBe careful.", "Be careful."),
        ('x-anthropic-billing-header: "a\\n\\u00e9\nBe\ncareful.', "Be\ncareful."),
        ("x-anthropic-billing-header: a", None),
        (
            "Be it.\nx-anthropic-billing-header: a",
            "Be it.\nx-anthropic-billing-header: a",
        ),
        ("x-anthropic-billing-header" + "a" * 5_000, "x-anthropic-billing-header" + "a" * 5_000),
    ],
)
@pytest.mark.parametrize("is_block", [False, True])
def test_of_an_attribution_only_its_line_is_left_out(
    text: str, expected: str | None, is_block: bool
) -> None:
    content = [{"type": "text", "text": text}] if is_block else text
    for messages in (ask_claude(system=content)["messages"], ask_claude(
        system=[], messages=[{"role": "system", "content": content}, *CLAUDE_CODE["messages"]],
    )["messages"]):  # fmt: skip
        given = messages[0]["content"] if messages[0]["role"] == "system" else None
        assert given == expected


def test_a_stop_string_after_a_complete_call_does_not_keep_it_from_running() -> None:
    def end(arguments: str) -> str:
        translation = translate(b"/v1/messages", CLAUDE_CODE)
        last = {"choices": [{"delta": {}, "finish_reason": "stop", "stop_reason": "END"}]}
        call = {"choices": [{"delta": call_delta("look", arguments)}]}
        data = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in (call, last))
        translator = StreamTranslator(translation.answer, int)
        events = b"".join(translator.convert(data + b"data: [DONE]\n\n")).split(b"\n\n")
        return json.loads(events[-3].split(b"\ndata: ")[1])["delta"]["stop_reason"]

    assert (end('{"at": 2}'), end('{"at": ')) == ("tool_use", "stop_sequence")


@pytest.mark.parametrize(
    ("path", "body", "tool"),
    [
        (b"/v1/responses", CODEX, {"type": "namespace", "name": "n", "tools": [
            {"type": "function", "name": f"f{n}"} for n in range(MAX_TOOLS + 1)]}),
        (b"/v1/messages", CLAUDE_CODE, None),
    ],
)  # fmt: skip
def test_tools_have_a_limit(path: bytes, body: dict, tool: dict | None) -> None:
    many = [{"name": f"f{n}", "input_schema": {}} for n in range(MAX_TOOLS + 1)]
    with pytest.raises(GatewayError, match=f"more than {MAX_TOOLS} tools"):
        translate(path, body, tools=[tool] if tool else many)
