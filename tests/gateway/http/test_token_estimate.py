"""How many tokens the gateway takes a prompt for."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.gateway.http import token_estimate
from cleave.gateway.http.token_estimate import IMAGE_TOKENS
from cleave.time_slices import run_at_once


def estimate_tokens(text: bytes, *, has_media: bool = False) -> int:
    return run_at_once(token_estimate.estimate_tokens(text, has_media=has_media))


def write(text: str, *, escaped: bool = False) -> bytes:
    return json.dumps(text, ensure_ascii=escaped).encode()


@pytest.mark.parametrize("length", [40, 400, 4_000, 400_000])
def test_four_letters_are_a_token(length: int) -> None:
    assert estimate_tokens(write("word" * (length // 4))) == pytest.approx(length / 4, abs=3)


@pytest.mark.parametrize("text", ["Привет, мир. ", "Καλημέρα κόσμε. ", "你好世界。", "안녕 세상. "])
@pytest.mark.parametrize("times", [5, 50, 500, 5_000])
def test_escaped_letters_weigh_as_much_as_others(text: str, times: int) -> None:
    plain = estimate_tokens(write(text * times))
    assert estimate_tokens(write(text * times, escaped=True)) == pytest.approx(plain, rel=0.15)


@pytest.mark.parametrize("times", [10, 100, 10_000])
def test_digits_are_tokens_nearly_each(times: int) -> None:
    assert estimate_tokens(write("27182818" * times)) == pytest.approx(10 * times, rel=0.05, abs=2)


def test_line_ends_are_no_escapes_of_letters() -> None:
    code = "if x:\n    return y\n" * 100
    assert estimate_tokens(write(code, escaped=True)) == estimate_tokens(write(code))


def test_a_picture_counts_as_one_however_large() -> None:
    picture = "data:image/png;base64," + base64.b64encode(bytes(300_000)).decode()
    parts = [
        {"type": "image_url", "image_url": {"url": picture}},
        {"type": "text", "text": "word" * 500},
    ]
    text = json.dumps([{"role": "user", "content": parts}]).encode()
    assert estimate_tokens(text, has_media=True) == pytest.approx(IMAGE_TOKENS + 500, abs=60)
    text = json.dumps([{"role": "user", "content": parts * 3}]).encode()
    assert estimate_tokens(text, has_media=True) == pytest.approx(3 * (IMAGE_TOKENS + 500), abs=150)


@pytest.mark.parametrize("place", [b'{"image_url":{"url": %b}}', b'{"image_url" :%b}'])
@pytest.mark.parametrize("times", [1, 100])
def test_a_picture_counts_wherever_it_is_fetched_from(place: bytes, times: int) -> None:
    text = b"[%b]" % b",".join([place % b'"https://example.org/a.png"'] * times)
    assert estimate_tokens(text, has_media=True) == pytest.approx(times * IMAGE_TOKENS, rel=0.05)


@pytest.mark.parametrize(
    "text",
    [
        ";base64," + "word" * 10_000,
        'say "url":"data:image/png;base64,' + "word" * 10_000 + '" here',
        '"data:;base64,' + "word" * 10_000,
        "data:image/png;base64," + "word" * 10_000,
        "\\u0" * 10_000,
        "\\u" * 20_000,
    ],
    ids=lambda text: text[:20],
)
@pytest.mark.parametrize("has_media", [False, True])
def test_a_text_that_looks_like_a_picture_or_escapes_counts(text: str, has_media: bool) -> None:
    assert estimate_tokens(write(text), has_media=has_media) > len(text) / 16
    message = json.dumps([{"role": "user", "content": text}]).encode()
    assert estimate_tokens(message, has_media=has_media) > len(text) / 16


def test_pictures_are_looked_for_a_bounded_number_of_times() -> None:
    text = json.dumps([";base64,"] * 100_000).encode()
    assert estimate_tokens(text) > 200_000


@given(st.text(max_size=3_000), st.booleans())
def test_any_text_has_a_token_and_no_more_than_two_for_each_byte(text: str, escaped: bool) -> None:
    body = write(text, escaped=escaped)
    assert 1 <= estimate_tokens(body) <= 2 * len(body)
