"""Estimates the number of tokens of a prompt from its JSON text. Pure; used for each request.
Long texts are searched in time slices.

A tokenizer would cost more than everything else in the gateway. What is hard: the number of bytes
alone is misleading. Digits are almost one token each; a client that escapes non-ASCII characters
sends six bytes for a letter that takes two as UTF-8; and the base64 of an image is not text. The
weights are round numbers that suit code, prose, JSON and many languages;
`benchmarks/dispatch/prompt_token_estimates.py` measures the error against two tokenizers, and each
instance's latency model corrects the scale.
"""

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from cleave.time_slices import Steps, run_at_once

BYTES_PER_TOKEN = 4
"""UTF-8 bytes per token of text without digits, in any alphabet."""
IMAGE_TOKENS = 1_000
"""An image of 885 x 885 pixels in Qwen2-VL (28 x 28 pixels per token); LLaVA-1.5: always 576."""
_DIGIT_BYTES = 4
"""Additional weight of a digit."""
_ESCAPE = b"\\u"
_ESCAPE_BYTES = 6
_ESCAPED_DIGITS = 4
"""Digits in an escape, at most; they are not digits of the text."""
_TWO_BYTE_ESCAPE = b"\\u0"
"""Latin to Thai: about two bytes in UTF-8; later characters have three."""
_SAMPLE_BYTES = 512
"""Approximate size of the sample: every n-th byte."""
_PART_BYTES = 4_096
_PARTS = 64
"""Number of parts of a long text in which escapes are counted: scanning 16 MiB takes 0.1 s."""
_BACKSLASH_RATIO = 40
"""Escapes are counted if more than one of so many bytes is a backslash; line ends have one, too."""
_DATA_URL = b";base64,"
_MIN_DATA_URL_BYTES = 4_096
_MAX_IMAGES = 64
SHORT_BYTES = 256 << 10
"""Bytes that are searched at a time, in 0.2 ms."""
_DIGITS = b"0123456789"

Buffer: TypeAlias = "bytes | memoryview | msgspec.Raw"


def estimate_tokens(text: Buffer) -> Steps[int]:
    """Estimated tokens of a prompt or of messages, given as JSON text; at least 1."""
    if len(text) <= SHORT_BYTES:
        return estimate_short(text)
    return (yield from _estimate_parts(memoryview(text)))


def estimate_short(text: Buffer) -> int:
    """The same of a text of at most SHORT_BYTES, at once."""
    raw = bytes(text)
    size = len(raw)
    if size > _MIN_DATA_URL_BYTES and raw.find(_DATA_URL) >= 0:
        return run_at_once(_estimate_parts(memoryview(raw)))
    return _compute_tokens([raw], size, raw[:: _choose_step(size)])


def _estimate_parts(text: memoryview) -> Steps[int]:
    parts, images = yield from _drop_data_urls(text)
    size = sum(map(len, parts))
    step = _choose_step(size)
    sample = b"".join([part[::step].tobytes() for part in parts])
    return _compute_tokens(parts, size, sample) + images * IMAGE_TOKENS


def _choose_step(size: int) -> int:
    """The distance between the bytes of the sample."""
    step = size // _SAMPLE_BYTES | 1
    # An escape has six bytes: a step with a common factor would sample only some of them.
    return step if step % 3 else step + 2


def _compute_tokens(texts: Sequence[bytes | memoryview], size: int, sample: bytes) -> int:
    sampled = len(sample) or 1
    digits = (sampled - len(sample.translate(None, _DIGITS))) * size // sampled
    if sample.count(b"\\") * _BACKSLASH_RATIO > sampled:
        escapes, two_byte = _count_escapes(texts, size)
        digits = max(0, digits - escapes * _ESCAPED_DIGITS)
        size -= escapes * (_ESCAPE_BYTES - 3) + two_byte
    return (size + digits * _DIGIT_BYTES) // BYTES_PER_TOKEN + 1


def count_token_ids(text: Buffer) -> Steps[int]:
    """The number of elements of a list of numbers, given as JSON text."""
    view, count = memoryview(text), 1
    for start in range(0, len(view), SHORT_BYTES):
        if start:
            yield
        count += bytes(view[start : start + SHORT_BYTES]).count(b",")
    return count


def _count_escapes(texts: Sequence[bytes | memoryview], size: int) -> tuple[int, int]:
    """(escapes, escapes of two UTF-8 bytes); estimated from parts of long texts."""
    step = max(size // _PARTS, _PART_BYTES)
    parts = [
        bytes(text[start : start + _PART_BYTES])
        for text in texts
        for start in range(0, len(text), step)
    ]
    scale = size / (sum(map(len, parts)) or 1)
    escapes, two_byte = (
        sum(part.count(each) for part in parts) for each in (_ESCAPE, _TWO_BYTE_ESCAPE)
    )
    return int(escapes * scale), int(two_byte * scale)


def _drop_data_urls(text: memoryview) -> Steps[tuple[list[memoryview], int]]:
    """(the text without the data of URLs, number of URLs); URLs beyond a limit stay in."""
    parts: list[memoryview] = []
    done = num = 0
    while num < _MAX_IMAGES:
        start = yield from _find(text, _DATA_URL, done)
        end = (yield from _find(text, b'"', start)) if start >= 0 else -1
        if end < 0:
            break
        parts.append(text[done:start])
        done = end
        num += 1
    parts.append(text[done:])
    return parts, num


def _find(text: memoryview, searched: bytes, start: int) -> Steps[int]:
    """Where it begins, from `start` on; -1: nowhere."""
    overlap = len(searched) - 1
    while start < len(text):
        end = start + SHORT_BYTES
        place = bytes(text[start : end + overlap]).find(searched)
        if place >= 0:
            return start + place
        start = end
        yield
    return -1
