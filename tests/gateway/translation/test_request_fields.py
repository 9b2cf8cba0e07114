"""Requests are translated in time slices: long ones like short ones, and no step takes long."""

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.gateway.http.errors import GatewayError
from cleave.gateway.translation import request_fields
from cleave.gateway.translation.request_fields import JsonText, ModelFacts
from cleave.gateway.translation.translations import TRANSLATORS
from cleave.time_slices import Steps, run_at_once

MAX_STEP_S = 0.005
TEXTS = st.text(st.sampled_from('ab{}[],:"\\\n\t\u00e9\U0001f600'), max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
pytestmark = pytest.mark.interpreted


def build(**members: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(members)


SOURCES = st.sampled_from([
    {"type": "url", "url": "http://x/\u00e9.png"},
    {"type": "base64", "data": "AAAA", "media_type": "image/png"},
])  # fmt: skip
TEXT_BLOCKS = build(type=st.just("text"), text=TEXTS)
USER_BLOCKS = (
    TEXT_BLOCKS
    | build(type=st.just("image"), source=SOURCES)
    | build(
        type=st.just("tool_result"),
        tool_use_id=TEXTS,
        content=TEXTS | st.lists(TEXT_BLOCKS | build(type=st.just("image"), source=SOURCES)),
    )
)
MODEL_BLOCKS = (
    TEXT_BLOCKS
    | build(type=st.just("thinking"), thinking=TEXTS)
    | build(type=st.just("tool_use"), id=TEXTS, name=TEXTS, input=JSON)
)
TURNS = (
    build(role=st.just("user"), content=TEXTS | st.lists(USER_BLOCKS, max_size=4))
    | build(role=st.just("assistant"), content=TEXTS | st.lists(MODEL_BLOCKS, max_size=4))
    | build(role=st.just("system"), content=TEXTS | st.lists(TEXT_BLOCKS, max_size=3))
)
PARTS = build(type=st.sampled_from(["input_text", "output_text", "refusal"]), text=TEXTS)
ITEMS = (
    build(
        role=st.sampled_from(["user", "assistant", "system", "developer"]),
        content=TEXTS | st.lists(PARTS, max_size=3),
    )
    | build(type=st.just("function_call"), call_id=TEXTS, name=TEXTS, arguments=TEXTS)
    | build(type=st.just("function_call_output"), call_id=TEXTS, output=TEXTS)
    | build(type=st.just("reasoning"), summary=st.lists(PARTS, max_size=2))
)
BODIES = {
    b"/v1/messages": build(
        model=st.just("m"), max_tokens=st.just(3), messages=st.lists(TURNS, min_size=1, max_size=5)
    ),
    b"/v1/responses": build(
        model=st.just("m"), instructions=TEXTS, input=TEXTS | st.lists(ITEMS, min_size=1)
    ),
}


@contextlib.contextmanager
def everything_is_long() -> Iterator[None]:
    limits = {"MIN_BYTES": 2, "_SHORT_LIST": 0, "_SLICE_BYTES": 3, "MAX_VALUE_BYTES": 64}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in limits.items():
            patch.setattr(request_fields, name, value)
        yield


def translate(path: bytes, body: bytes) -> dict[str, Any] | tuple[int, str | None]:
    try:
        completion = run_at_once(TRANSLATORS[path](body, ModelFacts())).completion
    except GatewayError as refusal:
        return refusal.status, refusal.param
    return {name: json.loads(bytes(raw)) for name, raw in completion.fields.items()}


@pytest.mark.parametrize("path", BODIES, ids=bytes.decode)
@settings(max_examples=150)
@given(data=st.data(), ascii_only=st.booleans())
def test_long_requests_are_translated_like_short_ones(
    path: bytes, data: st.DataObject, ascii_only: bool
) -> None:
    body = json.dumps(data.draw(BODIES[path]), ensure_ascii=ascii_only).encode()
    short = translate(path, body)
    with everything_is_long():
        assert translate(path, body) == short


@given(JSON, st.integers(1, 9), st.booleans())
def test_json_is_quoted_as_an_encoder_would(value: object, slice_bytes: int, spaced: bool) -> None:
    raw = json.dumps(value, indent="\t" if spaced else None, ensure_ascii=False).encode()
    text = JsonText()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_fields, "_SLICE_BYTES", slice_bytes)
        run_at_once(text.add_quoted(b"[", msgspec.Raw(raw), b"]"))
    assert json.loads(bytes(text.to_raw())) == [raw.decode()]


MIB = 1 << 20
LIST_BYTES = 300 << 10
"""Of lists whose elements are all translated; longer than what is decoded at once."""
TURN = b'{"role":"user","content":"%b"}'


def fill(before: bytes, unit: bytes, after: bytes, size: int = 4 * MIB) -> bytes:
    return before + unit * ((size - len(before) - len(after)) // len(unit)) + after


MESSAGES = b'{"model":"m","max_tokens":3,"messages":['
RESPONSES = b'{"model":"m","input":'
HOSTILE = {
    "one text": fill(MESSAGES + b'{"role":"user","content":"', b"a", b'"}]}'),
    "escapes": fill(MESSAGES + b'{"role":"user","content":"', b"\\u00e9", b'"}]}'),
    "short turns": fill(MESSAGES, TURN % b"" + b",", TURN % b"a" + b"]}", LIST_BYTES),
    "many turns": fill(MESSAGES, TURN % b"" + b",", TURN % b"a" + b"]}"),
    "small turns below a slice": fill(MESSAGES, TURN % b"" + b",", TURN % b"a" + b"]}", 64 << 10),
    "blocks": fill(
        MESSAGES + b'{"role":"user","content":[',
        b'{"type":"text"},',
        b'{"type":"text"}]}]}',
        LIST_BYTES,
    ),
    "results": fill(
        MESSAGES + b'{"role":"user","content":[',
        b'{"type":"tool_result","content":[]},',
        b'{"type":"text"}]}]}',
        LIST_BYTES,
    ),
    "arguments": fill(
        MESSAGES + b'{"role":"assistant","content":[{"type":"tool_use","input":{"a":"',
        b'\\"',
        b'"}}]}]}',
    ),
    "members": fill(MESSAGES + b'{"role":"user",', b'"a":1,', b'"content":""}]}'),
    "tools": fill(
        MESSAGES + TURN % b"a" + b'],"tools":[', b'{"name":"f"},', b'{"name":"f"}]}', LIST_BYTES
    ),
    "system": fill(
        b'{"model":"m","max_tokens":3,"system":[',
        b'{"type":"text","text":"a"},',
        b'{"type":"text","text":"a"}],"messages":[' + TURN % b"a" + b"]}",
        LIST_BYTES,
    ),
    "metadata": fill(MESSAGES + TURN % b"a" + b'],"metadata":{"user_id":"', b"a", b'"}}'),
    "items": fill(RESPONSES + b"[", TURN % b"" + b",", TURN % b"a" + b"]}", LIST_BYTES),
    "includes": fill(RESPONSES + b'"a","include":[', b'"",', b'""]}'),
    "known includes": fill(
        RESPONSES + b'"a","include":[',
        b'"reasoning.encrypted_content",',
        b'"reasoning.encrypted_content"]}',
    ),
    "instructions": fill(RESPONSES + b'"a","instructions":"', b"a", b'"}'),
    "names": fill(RESPONSES + b'"a","', b"\\n", b'":1}', 200 << 10),
    "white space": fill(RESPONSES + b"[", b" ", TURN % b"a" + b"]}"),
    "missing elements": fill(RESPONSES + b"[", b",", b"1]}", 90_000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_step_of_a_translation_takes_long(name: str) -> None:
    body = HOSTILE[name]
    paths = [b"/v1/responses"] if body.startswith(RESPONSES) else [b"/v1/messages"]
    for path in paths:
        # The least of three times, as the machine may interrupt any.
        assert (
            min(measure_longest_step(TRANSLATORS[path](body, ModelFacts())) for _ in range(3))
            < MAX_STEP_S
        )


def measure_longest_step(steps: Steps[object]) -> float:
    longest_s = 0.0
    while True:
        began = time.thread_time()
        try:
            next(steps)
        except (StopIteration, GatewayError):
            return max(longest_s, time.thread_time() - began)
        longest_s = max(longest_s, time.thread_time() - began)
