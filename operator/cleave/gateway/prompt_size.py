"""How many tokens a prompt is, roughly, from its JSON text. Pure.

A tokenizer would cost more than all else the gateway does. What is hard: bytes alone mislead where
it matters most. Digits are tokens nearly each; a client that escapes what is not ASCII sends six
bytes for a letter that others send in two; and a picture's base64 is no text at all. Weights are
round ones that serve code, prose, JSON and many languages; what they leave beside two tokenizers,
`benchmarks/dispatch/sizes.py` measures, and of that the scale is learnt by instances' lines.
"""

BYTES_PER_TOKEN = 4
"""Of text without digits, in any alphabet as UTF-8 has it."""
PICTURE_TOKENS = 1_000
"""885 x 885 pixels in Qwen2-VL, which takes 28 x 28 for a token; LLaVA-1.5 has 576 for any."""
_DIGIT_BYTES = 4
"""What a digit weighs besides itself."""
_ESCAPE = b"\\u"
_ESCAPE_BYTES = 6
_ESCAPED_DIGITS = 4
"""At most: they are no digits of the text's."""
_NEAR = b"\\u0"
"""Latin to Thai: about two bytes of text; what lies beyond has three."""
_SAMPLED = 512
"""Bytes looked at, or so: what a text is made of shows in every n-th of them."""
_PART_BYTES = 4_096
_PARTS = 64
"""Of a longer text, in which escapes are counted: all of 16 MiB would take 0.1 s."""
_FEW = 40
"""Of so many bytes one is a backslash before escapes are counted: line ends have one, too."""
_DATA = b";base64,"
_LEAST_WITH_DATA = 4_096
_MOST_PICTURES = 64
_DIGITS = b"0123456789"


def estimate_tokens(text: bytes) -> int:
    """Tokens of a string or of messages, as their JSON stands in a request; 1 at least."""
    pictures = 0
    size = len(text)
    if size > _LEAST_WITH_DATA and text.find(_DATA) >= 0:
        text, pictures = _drop_data(text)
        size = len(text)
    step = size // _SAMPLED | 1
    # Escapes are six bytes each: a step that shares a factor with them would see only a part.
    sample = text[:: step if step % 3 else step + 2]
    looked = len(sample) or 1
    digits = (looked - len(sample.translate(None, _DIGITS))) * size // looked
    if sample.count(b"\\") * _FEW > looked:
        escapes, near = _count_escapes(text)
        digits = max(0, digits - escapes * _ESCAPED_DIGITS)
        size -= escapes * (_ESCAPE_BYTES - 3) + near
    return (size + digits * _DIGIT_BYTES) // BYTES_PER_TOKEN + 1 + pictures * PICTURE_TOKENS


def _count_escapes(text: bytes) -> tuple[int, int]:
    """(escapes, those of them that are near), of a long text as its parts tell."""
    size = len(text)
    step = size // _PARTS
    if step <= _PART_BYTES:
        return text.count(_ESCAPE), text.count(_NEAR)
    parts = b"".join([text[at : at + _PART_BYTES] for at in range(0, size, step)])
    scale = size / len(parts)
    return int(parts.count(_ESCAPE) * scale), int(parts.count(_NEAR) * scale)


def _drop_data(text: bytes) -> tuple[bytes, int]:
    """(the text without the data of URLs, how many there were); what is beyond a bound stays."""
    kept = []
    done = num = 0
    while num < _MOST_PICTURES:
        start = text.find(_DATA, done)
        end = text.find(b'"', start) if start >= 0 else -1
        if end < 0:
            break
        kept.append(text[done:start])
        done = end
        num += 1
    kept.append(text[done:])
    return b"".join(kept), num
