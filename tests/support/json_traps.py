"""Bodies of requests in which two parsers of JSON could see different members.

Used by `tests/gateway/http/test_parser_differences.py`. Half are texts of a grammar whose parts are
known traps (equal and escaped keys, NaN, surrogates, other encodings, brackets that do not match),
half are those with bytes changed, copied, lost or inserted.
"""

import random

RESERVED = (
    "kv_transfer_params",
    "ec_transfer_params",
    "request_id",
    "uuid",
    "kv_cache_report_mode",
)
_NAMES = (
    *RESERVED, *RESERVED, "cleave_ttft_left_ms", "cleave_tpot_ms", "vllm_xargs", "vllm_xargs",
    "model", "messages", "messages", "prompt", "input", "query", "documents", "text_1", "data_1",
    "stream", "n", "max_tokens", "temperature", "logit_bias", "cache_salt", "priority", "tools",
    "content", "role", "type", "image_url", "a", "", "store", "data_parallel_rank", "session_id",
    "mm_processor_kwargs", "KV_TRANSFER_PARAMS", "kv_transfer_params ", "kv_transfer_param\u017f",
)  # fmt: skip
_NAMES_WITHOUT_MEDIA = tuple(name for name in _NAMES if name != "uuid")
_SCALARS = (
    b"0", b"1", b"-1", b"1.5", b"1e3", b"true", b"false", b"null", b'"x"', b'""', b'"uuid"',
    b'"kv_transfer_params"', b'"e\\u0301"', b'"\xc3\xa9"', b'"\xf0\x9f\x98\x80"',
    b'"\\ud83d\\ude00"', b'"\\\\ud800"', b'"a\\"b"', b'"\\\\"', b'"]}"', b'"{["', b'":,"',
)  # fmt: skip
_TRAPS = (
    b"NaN", b"Infinity", b"-Infinity", b"nan", b"1e999", b"-1e999", b"9" * 30, b"1" * 4_301,
    b"01", b"1.", b".5", b"+1", b"0x1", b"1_0", b"tru", b"None", b"undefined", b"'x'", b"//", b"",
    b'"\\ud800"', b'"\\udc00"', b'"\\ud83d\\ud83d\\ude00"', b'"\\uD83Dx"', b'"\\ud83d\\n"',
    b'"\xed\xa0\x80"', b'"\xed\xb0\x80"', b'"\xff"', b'"\xc0\xae"', b'"\xf4\x90\x80\x80"',
    b'"\xe2"',
    b'"\\x41"', b'"\\u12"', b'"\\u00zz"', b'"\x01"', b'"\n"', b'"\x7f"', b'"\\u0000"', b'"\x00"',
    b"[}", b"{]",
    b"[1,]", b'{"a":1,}', b'{"a"}', b"{1:2}", b"[1 2]", b'"', b'"a', b"\xa0", b"\x0b",
)  # fmt: skip
_SPACES = (b" ", b"\n", b"\t\r ", b" " * 9)
_NO_SPACES = (b"\x0b", b"\xc2\xa0", b"\xef\xbb\xbf", b"\x00", b"/**/")
_ENCODINGS = ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig", "utf-7", "latin-1")
_PIECES = (*_TRAPS, b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\\u", b'"uuid":', b"\x00")


class BodyGenerator:
    """An endless series of bodies, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._trap_share = 0.0

    def build_body(self) -> bytes:
        """The next body."""
        choice = self._random
        # Most bodies have one trap or none: otherwise hardly any would be read to its end.
        self._trap_share = choice.choice((0.0, 0.0, 0.01, 0.05))
        body = self._build_object(0, ("model", "prompt", "messages", "vllm_xargs"))
        if choice.random() < 0.3:
            body = self._mutate(body)
        if choice.random() < 0.02:
            body = body.decode("utf-8", "replace").encode(choice.choice(_ENCODINGS), "replace")
        return body

    def _build_object(self, depth: int, first: tuple[str, ...] = ()) -> bytes:
        choice = self._random
        count = choice.choice((0, 1, 1, 2, 3, 4)) if depth else choice.randrange(8)
        # A medium's name in a prompt is refused, so it must be rare for others to be read.
        known = _NAMES if choice.random() < 0.2 else _NAMES_WITHOUT_MEDIA
        names = [*first, *(choice.choice(known) for _ in range(count))]
        if first:
            choice.shuffle(names)
        return b"{" + b",".join([self._build_member(name, depth) for name in names]) + b"}"

    def _build_member(self, name: str, depth: int) -> bytes:
        value = b'"m"' if name == "model" else self._build_value(name, depth + 1)
        return self._pad(self._write_key(name)) + b":" + self._pad(value)

    def _write_key(self, name: str) -> bytes:
        choice = self._random
        letters = [f"\\u{ord(letter):04x}" if choice.random() < 0.04 else letter for letter in name]
        key = b'"' + "".join(letters).encode() + b'"'
        if choice.random() < self._trap_share:
            key = choice.choice(
                (key + b":", key[1:], b'"\xed\xa0\x80' + key[1:], b"'a'", b'"\\ud800"')
            )
        return key

    def _build_value(self, name: str, depth: int) -> bytes:
        choice = self._random
        if choice.random() < self._trap_share:
            return choice.choice(_TRAPS)
        if name == "vllm_xargs":
            return self._build_arguments()
        if depth < 5 and choice.random() < 0.15:
            return self._build_object(depth)
        if name in ("messages", "content", "documents", "input") and choice.random() < 0.8:
            return self._build_list(depth)
        if depth < 5 and choice.random() < 0.1:
            return self._build_list(depth)
        return choice.choice(_SCALARS)

    def _build_arguments(self) -> bytes:
        choice = self._random
        if choice.random() < 0.1:
            return self._build_object(4)
        members = []
        for _ in range(choice.randrange(5)):
            value = choice.choice((b"1", b"2.5", b'"x"', b"[1]", b'["y",3]', b"0", b"true", b"[]"))
            name = choice.choice((*RESERVED, "a", "b", "session_id", "cleave_tpot_ms"))
            members.append(self._write_key(name) + b":" + self._pad(value))
        return b"{" + b",".join(members) + b"}"

    def _build_list(self, depth: int) -> bytes:
        count = self._random.choice((0, 1, 2, 3))
        make = self._build_object if self._random.random() < 0.7 else None
        items = [
            make(depth + 1) if make else self._build_value("", depth + 1) for _ in range(count)
        ]
        return b"[" + b",".join(map(self._pad, items)) + b"]"

    def _pad(self, text: bytes) -> bytes:
        choice = self._random
        if choice.random() > 0.2:
            return text
        spaces = _NO_SPACES if choice.random() < self._trap_share else _SPACES
        return choice.choice(spaces) + text + choice.choice(_SPACES)

    def _mutate(self, body: bytes) -> bytes:
        choice = self._random
        for _ in range(choice.choice((1, 1, 2, 3))):
            at, to = sorted((choice.randrange(len(body) + 1), choice.randrange(len(body) + 1)))
            part = body[at : min(to, at + 40)]
            changes = (
                (at, bytes([choice.randrange(256)]), at + 1),
                (at, choice.choice(_PIECES), at),
                (at, b"", at + len(part)),
                (at, part, at),
                (to, part, to),
            )
            start, text, end = choice.choice(changes)
            body = body[:start] + text + body[end:]
        return body or b"{}"
