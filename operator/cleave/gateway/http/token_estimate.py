"""Estimates the number of tokens of a prompt from its JSON text. Pure; used for each request.
Long texts are searched in time slices.

A tokenizer would cost more than everything else in the gateway. What is hard: the number of bytes
alone is misleading. Digits are almost one token each; a client that escapes non-ASCII characters
sends six bytes for a letter that takes two as UTF-8; and the base64 of an image is not text, but
only where engines read an image. The weights are round numbers that suit code, prose, JSON and many
languages; `benchmarks/dispatch/prompt_token_estimates.py` measures the error against two
tokenizers, and each instance's latency model corrects the scale.
"""

import re
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
_DATA_URL = re.compile(rb";base64,")
_DATA_MEMBER = re.compile(
    rb'("url|_url|"data)"[ \t\n\r]{0,16}:[ \t\n\r]{0,16}"data:[^"\\,;]{0,100}\Z', re.IGNORECASE
)
"""Ends where the data of a URL begins; no text contains it, as texts' quotes are escaped."""
_MEMBER_BYTES = 160
"""Limit of a match."""
_URL_KEY = b'url"'
_URL_MEMBER = re.compile(rb'url"[ \t\n\r]{0,16}:[ \t\n\r]{0,16}"')
_QUOTE = re.compile(rb'"')
_OVERLAP = 7
_MAX_IMAGES = 64
"""More data URLs count as text."""
SHORT_BYTES = 256 << 10
"""Bytes that are searched at a time, in 0.2 ms."""
_SEARCH_BYTES = 32 << 10
"""Searched at a time for members, in at most 0.8 ms."""
_DIGITS = b"0123456789"

Buffer: TypeAlias = "bytes | memoryview | msgspec.Raw"


def estimate_tokens(text: Buffer, *, has_media: bool = False) -> Steps[int]:
    """Estimated tokens of a prompt or of messages, given as JSON text; at least 1. `has_media`: it
    may contain media, of which each counts as an image."""
    if len(text) <= (_SEARCH_BYTES if has_media else SHORT_BYTES):
        return estimate_short(text, has_media=has_media)
    return (yield from _estimate_parts(memoryview(text), has_media))


def estimate_short(text: Buffer, *, has_media: bool = False) -> int:
    """The same at once, of a text of at most SHORT_BYTES; with media 32 KiB."""
    raw = bytes(text)
    if has_media and (_URL_KEY in raw or b";base64," in raw):
        return run_at_once(_estimate_parts(memoryview(raw), has_media))
    size = len(raw)
    return _compute_tokens([raw], size, raw[:: _choose_step(size)])


def _estimate_parts(text: memoryview, has_media: bool) -> Steps[int]:
    parts, images = [text], 0
    if has_media:
        parts, images = yield from _drop_data_urls(text)
        images += yield from _count_urls(parts)
    yield
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
        # What looks like escapes may be a text about them, as `\\u0` is.
        size -= min(escapes * (_ESCAPE_BYTES - 3) + two_byte, size * 2 // 3)
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
    """(the text without the data of URLs, number of those that are no values of `url`)."""
    parts: list[memoryview] = []
    begin = done = others = 0
    for _ in range(_MAX_IMAGES):
        start = yield from _find(_DATA_URL, text, begin)
        if start < 0:
            break
        member = _DATA_MEMBER.search(text, max(start - _MEMBER_BYTES, done), start)
        begin = yield from _find(_QUOTE, text, start)
        if begin < 0:
            break
        if member is not None:
            parts.append(text[done:start])
            others += member[1].lower() == b'"data'
            done = begin
    parts.append(text[done:])
    return parts, others


def _count_urls(parts: Sequence[memoryview]) -> Steps[int]:
    """The number of members `url`, or the like, that have a text."""
    count = 0
    for part in parts:
        for start in range(0, len(part), _SEARCH_BYTES):
            if start:
                yield
            count += len(_URL_MEMBER.findall(part, start, start + _SEARCH_BYTES))
    return count


def _find(pattern: re.Pattern[bytes], text: memoryview, start: int) -> Steps[int]:
    """Where it begins, from `start` on; -1: nowhere."""
    while start < len(text):
        # A match may lie across the end.
        found = pattern.search(text, start, start + SHORT_BYTES + _OVERLAP)
        if found is not None:
            return found.start()
        start += SHORT_BYTES
        yield
    return -1
