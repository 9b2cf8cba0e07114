"""JSON and events that are written otherwise than vLLM writes them say the same."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.gateway.upstream.spellings import (
    MAX_ESCAPED_BYTES,
    MAX_LINES,
    SpellingError,
    decode_letters,
    normalize_event,
)

KEY = "kv_transfer_params"


def escape(text: str, places: set[int], upper: bool) -> str:
    form = "\\u%04X" if upper else "\\u%04x"
    return "".join(form % ord(each) if at in places else each for at, each in enumerate(text))


@given(st.sets(st.integers(0, len(KEY) - 1)), st.booleans(), st.text(), st.text())
def test_letters_can_be_read_and_the_json_is_the_same(places, upper, before, after) -> None:
    text = json.dumps([before, {"x": after}]).replace(
        '"x"', f'"{escape(KEY, places, upper=upper)}"'
    )
    plain = decode_letters(text.encode())
    assert json.loads(plain) == json.loads(text)
    assert b'"kv_transfer_params"' in plain


@given(st.recursive(st.text() | st.integers(), st.lists))
def test_json_without_escaped_letters_stays_the_same(value) -> None:
    value = json.loads(json.dumps(value).replace("\\\\", ""))
    text = json.dumps(value).encode()
    assert json.loads(decode_letters(text)) == value


def test_a_backslash_before_letters_of_an_escape_is_a_backslash() -> None:
    text = rb'{"a":"\\u0065","b":"\\\u0065","c":"\u0022"}'
    assert decode_letters(text) == rb'{"a":"\\u0065","b":"\\e","c":"\u0022"}'


def test_what_would_take_long_is_refused() -> None:
    with pytest.raises(SpellingError):
        decode_letters(b'"\\u0065' + b"x" * MAX_ESCAPED_BYTES + b'"')
    with pytest.raises(SpellingError):
        normalize_event(b"data: {}\n" * (MAX_LINES + 1) + b"\n")
    with pytest.raises(SpellingError):
        normalize_event(b'data: {"a":1}' + b"\r" * (1 << 19) + b"\n\n")


@pytest.mark.parametrize(
    "event",
    [
        b'data:{"a":{"b":1}}\n\n',
        b'data:   {"a":{"b":1}}  \n\n',
        b'event: x\nid: 1\ndata: {"a":{"b":1}}\n\n',
        b'data: {"a":\ndata: {"b":1}}\n\n',
        b'data: {"a":\rdata: {"b":1}}\n\n',
        b'data: {"\\u0061":{"\\u0062":1}}\n\n',
    ],
)
def test_an_event_is_one_line(event: bytes) -> None:
    normal = normalize_event(event)
    assert normal.startswith(b'data: {"a":')
    assert normal.endswith(b"}\n\n")
    assert normal.count(b"\n") == 2
    assert json.loads(normal[6:]) == {"a": {"b": 1}}


@pytest.mark.parametrize("event", [b": ping\n\n", b"<html>\n\n", b"\n\n", b"id: 1\n\n"])
def test_what_has_no_data_stays_as_it_is(event: bytes) -> None:
    assert normalize_event(event) == event
