"""Converts text to token ids and back, without a vocabulary file. Used by the API.

A generated token is a word of a space and four letters, and text is cut at spaces into pieces of at
most four characters. So generated text after any prompt is tokenized into exactly the tokens it was
generated from, and another engine can resume a request from prompt and text so far. Other pieces
are hashed into the rest of the id space: counts are exact, but their text is lost.
"""

import re
import zlib

VOCAB_SIZE = 50272
"""OPT's vocabulary size; higher ids are rejected, as in vLLM."""
EOS = 2

_FIRST_WORD_ID = 4
_FIRST_HASHED_ID = 8192
_CONSONANTS = "bdfghjklmnprstvz"
_VOWELS = "aeiou"
_SYLLABLES = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]
_VOCABULARY = [f" {first}{second}" for first in _SYLLABLES for second in _SYLLABLES]
_IDS = {word: _FIRST_WORD_ID + index for index, word in enumerate(_VOCABULARY)}
_PIECE = re.compile(r"\s?\S{1,4}|\s")


def encode(text: str) -> list[int]:
    """Return the token ids of a text."""
    ids = _IDS
    return [ids.get(piece) or _hash(piece) for piece in _PIECE.findall(text)]


def decode(token: int) -> str:
    """Return the text of a generated token; empty for the end of text."""
    index = token - _FIRST_WORD_ID
    return _VOCABULARY[index] if 0 <= index < len(_VOCABULARY) else ""


def list_word_ids() -> range:
    """Return the ids of all tokens that are generated, except EOS."""
    return range(_FIRST_WORD_ID, _FIRST_WORD_ID + len(_VOCABULARY))


def choose_word(value: int) -> int:
    """Choose a word by 64 well-mixed bits."""
    return _FIRST_WORD_ID + (value >> 16) % len(_VOCABULARY)


def _hash(piece: str) -> int:
    digest = zlib.crc32(piece.encode(errors="replace"))
    return _FIRST_HASHED_ID + digest % (VOCAB_SIZE - _FIRST_HASHED_ID)
