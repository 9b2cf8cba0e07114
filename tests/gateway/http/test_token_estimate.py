"""How many tokens the gateway takes a prompt for."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.gateway.http import token_estimate
from cleave.gateway.http.token_estimate import IMAGE_TOKENS
from cleave.time_slices import run_at_once


def estimate_tokens(text: bytes) -> int:
    return run_at_once(token_estimate.estimate_tokens(text))


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
    assert estimate_tokens(text) == pytest.approx(IMAGE_TOKENS + 500, abs=60)
    text = json.dumps([{"role": "user", "content": parts * 3}]).encode()
    assert estimate_tokens(text) == pytest.approx(3 * (IMAGE_TOKENS + 500), abs=150)


def test_pictures_are_looked_for_a_bounded_number_of_times() -> None:
    text = json.dumps([";base64,"] * 100_000).encode()
    assert estimate_tokens(text) > 200_000


@given(st.text(max_size=3_000), st.booleans())
def test_any_text_has_a_token_and_no_more_than_two_for_each_byte(text: str, escaped: bool) -> None:
    body = write(text, escaped=escaped)
    assert 1 <= estimate_tokens(body) <= 2 * len(body)
