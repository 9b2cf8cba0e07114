"""No request breaks the translations: each is translated, or refused with a 400 that names why."""

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.gateway.http.errors import GatewayError
from cleave.gateway.translation import messages_request, responses_request
from cleave.gateway.translation.request_fields import ENGINE_FIELDS, ModelFacts
from cleave.gateway.translation.translations import TRANSLATORS
from cleave.time_slices import run_at_once

TEXTS = st.text(max_size=3) | st.sampled_from(["user", "assistant", "auto", "m", "{}", "\ud800"])
KEYS = st.sampled_from([
    "type", "role", "content", "text", "source", "name", "input", "format", "schema", "summary",
    "output", "image_url", "thinking", "tool_use_id", "effort", "parameters", "arguments", "tools",
    "tool", "tool_name", "definition", "namespace", "call_id", "status", "mode", "defer_loading",
])  # fmt: skip
KINDS = st.sampled_from([
    "text", "image", "document", "tool_use", "tool_result", "message", "reasoning", "function",
    "function_call", "function_call_output", "input_text", "input_image", "url", "base64", "tool",
    "enabled", "json_schema", "namespace", "custom", "custom_tool_call", "custom_tool_call_output",
    "allowed_tools", "additional_tools", "web_search", "web_search_call", "tool_reference",
    "tool_addition", "tool_removal", "tool_definition", "system", "incomplete", "grammar",
])  # fmt: skip
LEAVES = st.none() | st.booleans() | st.integers(-2, 10**20) | st.floats() | TEXTS | KINDS
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner), max_leaves=20
)


MESSAGES = frozenset((
    "max_tokens", "messages", "metadata", "model", "output_config", "stop_sequences", "stream",
    "system", "thinking", "tool_choice", "tools",
))  # fmt: skip
RESPONSES = frozenset((
    "background", "include", "input", "instructions", "max_output_tokens", "model",
    "parallel_tool_calls", "reasoning", "service_tier", "stream", "text", "tool_choice", "tools",
    "truncation", "user",
))  # fmt: skip
"""Fields that are translated."""


def make_bodies(known: frozenset[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(sorted(known | ENGINE_FIELDS)), VALUES, max_size=6)


@pytest.mark.parametrize(
    ("path", "least", "known"),
    [
        (b"/v1/messages", {"max_tokens": 3}, MESSAGES | messages_request.REFUSED.keys()),
        (b"/v1/messages/count_tokens", {}, MESSAGES | messages_request.REFUSED.keys()),
        (b"/v1/responses", {"input": "a"}, RESPONSES | responses_request.REFUSED.keys()),
    ],
)
@given(data=st.data())
def test_every_request_is_translated_or_refused(
    path: bytes, least: dict, known: frozenset[str], data: st.DataObject
) -> None:
    complete = {"model": "m", "messages": [{"role": "user", "content": "a"}]} | least
    if path == b"/v1/responses":
        del complete["messages"]
    body = complete | data.draw(make_bodies(known))
    with contextlib.suppress(GatewayError):
        run_at_once(TRANSLATORS[path](json.dumps(body).encode(), ModelFacts()))


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b'{"model": "m"}', b'{"input": ' * 5_000])
@pytest.mark.parametrize("translate", TRANSLATORS.values(), ids=map(bytes.decode, TRANSLATORS))
def test_what_is_no_request_is_refused(translate: Callable, body: bytes) -> None:
    with pytest.raises(GatewayError) as refusal:
        run_at_once(translate(body, ModelFacts()))
    assert refusal.value.status == 400
