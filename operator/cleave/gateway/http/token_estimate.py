"""Estimates the number of tokens of a prompt from its JSON text. Pure; used for each request.

A tokenizer would cost more than everything else in the gateway. What is hard: the number of bytes
alone is misleading. Digits are almost one token each; a client that escapes non-ASCII characters
sends six bytes for a letter that takes two as UTF-8; and the base64 of an image is not text. The
weights are round numbers that suit code, prose, JSON and many languages;
`benchmarks/dispatch/prompt_token_estimates.py` measures the error against two tokenizers, and each
instance's latency model corrects the scale.
"""

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
_DIGITS = b"0123456789"


def estimate_tokens(text: bytes) -> int:
    """Estimated tokens of a prompt or of messages, given as JSON text; at least 1."""
    images = 0
    size = len(text)
    if size > _MIN_DATA_URL_BYTES and text.find(_DATA_URL) >= 0:
        text, images = _drop_data_urls(text)
        size = len(text)
    step = size // _SAMPLE_BYTES | 1
    # An escape has six bytes: a step with a common factor would sample only some of them.
    sample = text[:: step if step % 3 else step + 2]
    sampled = len(sample) or 1
    digits = (sampled - len(sample.translate(None, _DIGITS))) * size // sampled
    if sample.count(b"\\") * _BACKSLASH_RATIO > sampled:
        escapes, two_byte = _count_escapes(text)
        digits = max(0, digits - escapes * _ESCAPED_DIGITS)
        size -= escapes * (_ESCAPE_BYTES - 3) + two_byte
    return (size + digits * _DIGIT_BYTES) // BYTES_PER_TOKEN + 1 + images * IMAGE_TOKENS


def _count_escapes(text: bytes) -> tuple[int, int]:
    """(escapes, escapes of two UTF-8 bytes); estimated from parts of a long text."""
    size = len(text)
    step = size // _PARTS
    if step <= _PART_BYTES:
        return text.count(_ESCAPE), text.count(_TWO_BYTE_ESCAPE)
    parts = b"".join([text[at : at + _PART_BYTES] for at in range(0, size, step)])
    scale = size / len(parts)
    return int(parts.count(_ESCAPE) * scale), int(parts.count(_TWO_BYTE_ESCAPE) * scale)


def _drop_data_urls(text: bytes) -> tuple[bytes, int]:
    """(the text without the data of URLs, number of URLs); URLs beyond a limit stay in."""
    parts = []
    done = num = 0
    while num < _MAX_IMAGES:
        start = text.find(_DATA_URL, done)
        end = text.find(b'"', start) if start >= 0 else -1
        if end < 0:
            break
        parts.append(text[done:start])
        done = end
        num += 1
    parts.append(text[done:])
    return b"".join(parts), num
