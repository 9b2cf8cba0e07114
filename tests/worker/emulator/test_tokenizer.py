"""The tokenizer: exact counts, and generated text that is cut into the tokens it was made of."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave_worker.emulator import tokenizer


@given(st.text(), st.lists(st.integers(min_value=0, max_value=2**64 - 1), max_size=30))
def test_generated_text_after_any_prompt_is_cut_into_its_tokens(
    prompt: str, values: list[int]
) -> None:
    tokens = [tokenizer.choose_word(value) for value in values]
    text = "".join(map(tokenizer.decode, tokens))
    assert tokenizer.encode(prompt + text) == tokenizer.encode(prompt) + tokens


@given(st.text())
def test_every_text_becomes_ids_of_the_vocabulary(text: str) -> None:
    tokens = tokenizer.encode(text)
    assert all(0 <= token < tokenizer.VOCAB_SIZE for token in tokens)
    assert bool(tokens) == bool(text)


def test_words_are_distinct_and_come_back() -> None:
    texts = {tokenizer.decode(token) for token in tokenizer.list_word_ids()}
    assert len(texts) == len(tokenizer.list_word_ids())
    assert {len(text) for text in texts} == {5}
    assert [tokenizer.encode(tokenizer.decode(token)) for token in tokenizer.list_word_ids()] == [
        [token] for token in tokenizer.list_word_ids()
    ]


def test_the_end_of_text_has_no_text() -> None:
    assert tokenizer.decode(tokenizer.EOS) == ""
    assert tokenizer.EOS not in tokenizer.list_word_ids()


@pytest.mark.parametrize(("text", "count"), [("", 0), ("a", 1), ("hello", 2), ("a b  c\n", 5)])
def test_pieces_are_at_most_four_characters(text: str, count: int) -> None:
    assert len(tokenizer.encode(text)) == count


def test_english_has_about_four_characters_per_token() -> None:
    rng = random.Random(1)
    text = " ".join("x" * rng.randrange(2, 9) for _ in range(500))
    assert 2.5 < len(text) / len(tokenizer.encode(text)) < 5
