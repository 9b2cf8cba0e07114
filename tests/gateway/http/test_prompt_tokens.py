"""All that engines compute of a request counts as its prompt."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.gateway.app import routes
from cleave.gateway.http.engine_fields import (
    FIELD_RULES,
    PROMPT_RULES,
    TABLES,
    VLLM_FIELDS,
    list_names,
)
from cleave.gateway.http.errors import GatewayError
from cleave.gateway.http.prompt_tokens import EMBEDS_KEY, MAX_DOCUMENTS, SIDE_FIELDS

from tests.support.completions import parse_completion, parse_engine_request

COMPLETION_PATHS = {route.path for route in routes.COMPLETION_ROUTES}
PATHS = sorted(TABLES)
TEXT = "word " * 2_000
NO_TEXT = list_names(FIELD_RULES) - list_names(PROMPT_RULES)


def count_tokens(path: bytes, **fields: object) -> int:
    body = json.dumps({"model": "m"} | fields).encode()
    if path not in COMPLETION_PATHS:
        return parse_engine_request(path, body, "").prompt_tokens
    return parse_completion(path, body).prompt_tokens


@pytest.mark.parametrize("path", PATHS)
def test_each_field_that_becomes_part_of_a_prompt_counts(path: bytes) -> None:
    """Embeddings are no text: a client that leaves pays for their bytes."""
    for name in sorted({*VLLM_FIELDS.paths[path.decode()]} - NO_TEXT - {EMBEDS_KEY}):
        for value in (TEXT, [TEXT], [{"role": "user", "content": TEXT}], {"text": TEXT}):
            if name != "prompt" or not isinstance(value, dict):
                assert count_tokens(path, **{name: value}) > len(TEXT) / 4, (name, value)


def test_fields_with_media_are_prompts() -> None:
    for path, table in TABLES.items():
        assert {*table.prompts} <= {*table.texts}
        if path in COMPLETION_PATHS:
            assert {*table.texts} - {"messages", "prompt"} <= SIDE_FIELDS


@pytest.mark.parametrize(
    ("path", "query", "documents"),
    [
        (b"/rerank", "query", "documents"),
        (b"/v1/rerank", "instruction", "documents"),
        (b"/v2/rerank", "chat_template_kwargs", "documents"),
        (b"/score", "queries", "documents"),
        (b"/score", "queries", "items"),
        (b"/v1/score", "text_1", "text_2"),
        (b"/v1/score", "data_1", "data_2"),
    ],
)
def test_a_query_counts_with_each_document(path: bytes, query: str, documents: str) -> None:
    for value in (TEXT, [TEXT]):
        once = count_tokens(path, **{query: value, documents: ["a"]})
        assert count_tokens(path, **{query: value, documents: ["a"] * 100}) > 99 * once
    pairs = count_tokens(path, **{query: ["a, b"] * 100, documents: ["c"] * 100})
    assert pairs < 1_000, "as many queries as documents are scored one by one"


def test_documents_are_bounded_in_number() -> None:
    for size in (MAX_DOCUMENTS + 1, MAX_DOCUMENTS * 4):
        with pytest.raises(GatewayError, match="list of more than 65536") as refused:
            count_tokens(b"/rerank", query="a", documents=[""] * size)
        assert (refused.value.status, refused.value.param) == (400, "documents")
    assert count_tokens(b"/rerank", query="a", documents=["a"] * 20_000) > 20_000


@given(st.lists(st.text(max_size=20), max_size=30), st.booleans())
def test_documents_are_counted_as_they_are_written(documents: list[str], escaped: bool) -> None:
    body = {"model": "m", "query": TEXT, "documents": documents}
    raw = json.dumps(body, ensure_ascii=escaped).encode()
    tokens = parse_engine_request(b"/rerank", raw, "").prompt_tokens
    least = max(len(documents), 1) * len(TEXT) // 4
    assert least <= tokens <= least + 2_000


def test_tools_count_in_chats() -> None:
    messages = [{"role": "user", "content": "a"}]
    tools = [{"type": "function", "function": {"name": "f", "description": TEXT}}]
    path = routes.CHAT_PATH
    plain = count_tokens(path, messages=messages)
    assert count_tokens(path, messages=messages, tools=tools) > plain + len(TEXT) / 4
