"""Members of large bodies, found in slices, are those that msgspec finds."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.gateway.http import large_json
from cleave.gateway.http.bounded_json import TooManyMembersError
from cleave.gateway.http.large_json import MAX_DEPTH, MemberScanner

TEXTS = st.text(st.sampled_from('ab{}[],:"\\\\ \n\u00e9\U0001f600'), max_size=8)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
SPACES = st.sampled_from(["", " ", "\n\t", " " * 9])
SLICES = st.integers(1, 9) | st.just(1_000)


def scan(text: bytes, slice_bytes: int = 5, limit: int = 64) -> MemberScanner:
    large_json.SLICE_BYTES = slice_bytes
    scanner = MemberScanner(text, limit)
    while not scanner.step():
        pass
    return scanner


@pytest.fixture(autouse=True)
def keep_slices(monkeypatch):
    monkeypatch.setattr(large_json, "SLICE_BYTES", large_json.SLICE_BYTES)


def write(value: object, space: str, ascii_only: bool) -> bytes:
    separators = (space + "," + space, space + ":" + space)
    text = json.dumps(value, separators=separators, ensure_ascii=ascii_only)
    return (space + text + space).encode()


def plain(raw: msgspec.Raw) -> bytes:
    return bytes(raw).rstrip(b" \n\t")


@settings(max_examples=400)
@given(st.dictionaries(TEXTS, VALUES, max_size=6), SPACES, st.booleans(), SLICES)
def test_an_object_has_the_members_that_msgspec_finds(value, space, ascii_only, size) -> None:
    text = write(value, space, ascii_only)
    expected = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    members = scan(text, size).list_members()
    assert list(members) == list(expected)
    assert [plain(raw) for raw in members.values()] == [plain(raw) for raw in expected.values()]


@settings(max_examples=200)
@given(st.lists(VALUES, max_size=6), SPACES, st.booleans(), SLICES)
def test_a_list_has_the_elements_that_msgspec_finds(value, space, ascii_only, size) -> None:
    text = write(value, space, ascii_only)
    expected = msgspec.json.decode(text, type=list[msgspec.Raw])
    assert [plain(raw) for raw in scan(text, size).list_elements()] == [
        plain(raw) for raw in expected
    ]


@settings(max_examples=200)
@given(st.lists(VALUES, max_size=6), SPACES, st.booleans(), SLICES)
def test_elements_are_found_when_they_are_accessed(value, space, ascii_only, size) -> None:
    text = write(value, space, ascii_only)
    expected = msgspec.json.decode(text, type=list[msgspec.Raw])
    elements = scan(text, size).locate_elements()
    assert [plain(each) for each in elements] == [plain(raw) for raw in expected]


def test_elements_that_are_missing_are_an_error_when_they_are_accessed() -> None:
    elements = scan(b"[1,,2]").locate_elements()
    assert (bytes(elements[0]), bytes(elements[2]), len(elements)) == (b"1", b"2", 3)
    with pytest.raises(msgspec.DecodeError):
        elements[1]
    with pytest.raises(TooManyMembersError):
        scan(b"[1,2,3]", limit=2).locate_elements()


def test_white_space_before_a_value_has_a_limit() -> None:
    for space in (b" " * 100, b"\n\t" * 200):
        assert bytes(scan(b'{"a":' + space + b"1}").list_members()["a"]) == b"1"
    with pytest.raises(msgspec.DecodeError, match="more than 1024 bytes of white space"):
        scan(b'{"a":' + b" " * 5_000 + b"1}").list_members()


@settings(max_examples=600)
@given(
    st.dictionaries(TEXTS, VALUES, max_size=4),
    st.lists(st.tuples(st.integers(0, 200), st.sampled_from(b'{}[],:"\\ a1')), max_size=3),
    SLICES,
)
def test_valid_json_is_split_alike_and_the_rest_is_an_error_of_msgspec(
    value, changes, size
) -> None:
    text = bytearray(write(value, " ", True))
    for place, byte in changes:
        text[place % len(text)] = byte
    try:
        expected = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        expected = None
    try:
        members = scan(bytes(text), size).list_members()
    except (msgspec.MsgspecError, UnicodeDecodeError):
        assert expected is None
    else:
        if expected is not None:
            assert {k: plain(v) for k, v in members.items()} == {
                k: plain(v) for k, v in expected.items()
            }


def test_of_equal_keys_the_last_one_counts() -> None:
    members = scan(b'{"a":1,"\\u0061":2}').list_members()
    assert {key: bytes(raw) for key, raw in members.items()} == {"a": b"2"}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b" ",
        b"1",
        b'"a"',
        b"{",
        b'{"a":1',
        b'{"a":1}}',
        b'{"a":1} {}',
        b'{"a":1} x',
        b'x{"a":1}',
        b'{"a" 1}',
        b'{"a":1,}',
        b"{,}",
        b'{"a":}',
        b'{"a":1:2}',
        b'{"a":"}',
        b'{"a":"\\"}',
        b"{a:1}",
        b"]",
        b'{"a":1]',
        b'["a":1}',
        b'{"' + b"k" * 5_000 + b'":1}',
    ],
)
@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_what_is_no_object_is_refused(text: bytes, size: int) -> None:
    with pytest.raises((msgspec.MsgspecError, UnicodeDecodeError)):
        scan(text, size).list_members()


@pytest.mark.parametrize("text", [b"[1,]", b"[,]", b'["a":1]', b'{"a":1}', b"[1}"])
def test_what_is_no_list_is_refused(text: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        scan(text).list_elements()


@pytest.mark.parametrize("size", [3, 10_000])
def test_members_beyond_the_limit_end_the_scan(size: int) -> None:
    text = b"[" + b"1," * 99 + b"1]"
    assert len(scan(text, size, 100).list_elements()) == 100
    with pytest.raises(TooManyMembersError):
        scan(text, size, 99).list_elements()
    text = b'{"a":1' + b',"a":1' * 99 + b"}"
    assert len(scan(text, size, 100).list_members()) == 1
    with pytest.raises(TooManyMembersError):
        scan(text, size, 99).list_members()


def test_brackets_nest_up_to_a_bound() -> None:
    fits = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert [bytes(raw) for raw in scan(fits, 64).list_elements()] == [fits[1:-1]]
    with pytest.raises(msgspec.DecodeError, match="nested more than 1000 deep"):
        scan(b"[" + fits + b"]", 64)
