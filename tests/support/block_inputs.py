"""Inputs of every kind that could hold a gateway's event loop: from clients and from engines.

Used by `tests/gateway/app/test_fuzz_blocks.py`. An input repeats a small unit until it has a size:
that is what makes a step long that looks short. Units, places, framings and sizes are drawn.
"""

import json
import random
from dataclasses import dataclass

from cleave.gateway.app import routes
from cleave.gateway.http import engine_fields

MODEL = "m"
SIZES = (3 << 10, 15 << 10, 60 << 10, 250 << 10, 260 << 10, 1 << 20)
LARGE_SIZES = (*SIZES, 4 << 20, (16 << 20) - 1_024)
"""The largest body that is received, and what is read with and without time slices."""

_TEXTS = (
    b"a", b"a b ", b"\\u0041", b"\\ud83d\\ude00", b"\\ud83d", b'\\"', b"\\\\", b"\\n",
    b"\\u0000", "\u00e9".encode(), "\U0001f600".encode(), b"{", b"[", b"}", b",", b"7", b"\xff",
    b"\xed\xa0\x80",
    b"kv_transfer_params", b'\\"kv_transfer_params\\"', b"data: ", b"data:image/png;base64,AAAA",
    b'\\"uuid\\":', b';base64,\\"', b";base64," * 64 + b"a" * 4_000, b"\\\\u0",
)  # fmt: skip
_ITEMS = (
    b"0", b"-1.5e3", b'""', b'"a"', b"{}", b"[]", b"null", b"[1,2]", b'{"a":0}', b'{"a":[{}]}',
    b'"\\u0041"', b'{"type":"text","text":"a"}', b'{"role":"user","content":"a"}',
    b'{"role":"user","content":[{"type":"text","text":"a"}]}',
    b'{"role":"tool","tool_call_id":"a","content":"b"}',
    (b'{"role":"assistant","tool_calls":[{"id":"a","type":"function","function":'
    b'{"name":"f","arguments":"{}"}}]}'),
    b'{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}',
    b'{"type":"function","function":{"name":"f","parameters":{}}}',
    b'{"type":"function","name":"f","parameters":{}}', b'{"name":"f","input_schema":{}}',
    b'{"type":"message","role":"user","content":[{"type":"input_text","text":"a"}]}',
    b'{"type":"function_call","call_id":"a","name":"f","arguments":"{}"}',
    b'{"type":"function_call_output","call_id":"a","output":"b"}',
    b'{"type":"reasoning","summary":[],"content":[{"type":"reasoning_text","text":"a"}]}',
    b'{"role":"user","content":[{"type":"tool_result","tool_use_id":"a","content":"b"}]}',
    b'{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"f","input":{}}]}',
    b'{"type":"tool_use","id":"a","name":"f","input":{}}', b'"message.output_text.logprobs"',
    b'"%b"' % (b"\\u0041" * 40), b'"%b"' % (b';base64,\\"' * 64), b'"u"', b'"url":"a"',
    b'"reasoning.encrypted_content"', b"NaN", b'{"kv_transfer_params":0}', b'{"uuid":"a"}',
)  # fmt: skip
_KEYS = (b'"%d"', b'"a"', b'"\\u0061%d"', b'"type"', b'"kv_transfer_param%d"', b'"%d\xc3\xa9"')

_CHAT = b'{"model":"m","messages":[{"role":"user","content":"a"}],'
BEGINS = {
    routes.CHAT_PATH: _CHAT,
    routes.COMPLETIONS_PATH: b'{"model":"m","prompt":"a",',
    b"/v1/responses": b'{"model":"m","input":"a",',
    b"/v1/messages": _CHAT + b'"max_tokens":3,',
    b"/v1/messages/count_tokens": _CHAT,
    b"/v1/embeddings": b'{"model":"m","input":"a",',
    b"/pooling": b'{"model":"m","input":"a",',
    b"/classify": b'{"model":"m","input":"a",',
    b"/score": b'{"model":"m","text_1":"a","text_2":"b",',
    b"/rerank": b'{"model":"m","query":"a","documents":["b"],',
    b"/tokenize": b'{"model":"m","prompt":"a",',
    b"/detokenize": b'{"model":"m","tokens":[1],',
}
_OTHER_FIELDS = (
    "include", "instructions", "text", "reasoning", "system", "thinking", "stop_sequences",
    "metadata", "vllm_xargs", "kv_transfer_params", "unknown", "model",
)  # fmt: skip
_PLACES = (
    b"%b", b"[%b]", b'{"a":%b}', b'[{"role":"user","content":%b}]',
    b'[{"role":"user","content":[{"type":"text","text":%b}]}]',
    b'[{"type":"function","function":{"name":"f","parameters":%b}}]',
    b'[{"name":"f","input_schema":%b}]', b'[{"type":"function","name":"f","parameters":%b}]',
    b'[{"type":"message","role":"user","content":[{"type":"input_text","text":%b}]}]',
    b'[{"type":"function_call_output","call_id":"a","output":%b}]',
    b'[{"role":"user","content":[{"type":"tool_result","tool_use_id":"a","content":%b}]}]',
    b'[{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"f","input":%b}]}]',
    b'{"type":"json_schema","json_schema":{"name":"a","schema":%b}}',
    b'{"format":{"type":"json_schema","name":"a","schema":%b}}',
)  # fmt: skip
_HEADER_LINES = (
    b"x: %d\r\n", b"x%d: \r\n", b"cookie: a=%d\r\n", b"x-request-id: %d\r\n", b"a:%d\r\n",
    b"authorization: Bearer %d\r\n", b"content-type: a%d\r\n", b"accept: */*;q=0.%d\r\n",
    b"traceparent: 00-%032x-00f067aa0ba902b7-01\r\n", b"tracestate: a=%d\r\n",
)  # fmt: skip
_LONG_FIELDS = (
    b"x", b"authorization", b"x-api-key", b"x-request-id", b"traceparent", b"tracestate", b"host",
    b"origin", b"content-type", b"content-length", b"cookie", b"accept", b"x-session-id",
)  # fmt: skip
_PAGES = tuple(route.path for route in (*routes.OWN_ROUTES, *routes.INTERNAL_ROUTES))
_EVENTS = (
    b'data: {"choices":[{"index":0,"text":"a"}]}', b'data: {"choices":[{"index":%d,"text":"a"}]}',
    b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}',
    b'data: {"choices":[{"index":0,"delta":{"reasoning_content":"a"}}]}',
    (b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":%d,"id":"a","type":"function",'
    b'"function":{"name":"f","arguments":"{"}}]}}]}'),
    b'data: {"choices":[{"index":0,"text":"a","token_ids":[1]}]}',
    (b'data: {"choices":[{"index":0,"text":"a","logprobs":{"tokens":["a"],"token_logprobs":[-1.0],'
    b'"top_logprobs":[{"a":-1.0,"b":-2.0}],"text_offset":[0]}}]}'),
    (b'data: {"choices":[{"index":0,"delta":{"content":"a"},"logprobs":{"content":[{"token":"a",'
    b'"logprob":-1.0,"bytes":[97],"top_logprobs":[{"token":"a","logprob":-1.0,"bytes":[97]}]}]}}]}'),
    b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":%d}}',
    b"data: {}", b"data: ", b": ping", b"x", b"data: [DONE]", b'data: {"error":{"message":"a"}}',
    b'data: {"choices":[{"index":0,"text":"","finish_reason":"abort"}]}', b"data: [[[[",
)  # fmt: skip
_WHOLE = (
    b'{"choices":[{"text":%b}],"usage":{"prompt_tokens":1,"completion_tokens":1}}',
    b'{"choices":[{"message":{"content":%b}}],"usage":{"prompt_tokens":1,"completion_tokens":1}}',
    b'{"choices":[{"message":{"tool_calls":%b}}],"usage":{"prompt_tokens":1}}',
    b'{"choices":[{"text":"a","logprobs":%b}]}', b'{"choices":%b}', b'{"usage":%b}', b"%b",
    b'{"choices":[{"text":"a"}],"kv_transfer_params":%b}', b'{"data":%b}', b'{"tokens":%b}',
    b'{"object":"error","message":%b,"code":400}', b'{"error":{"message":%b}}',
)  # fmt: skip
_FIELDS = sorted({name for rule in engine_fields.FIELD_RULES for name in rule.names})
WHOLE_ANSWER = _WHOLE[0] % b'"a"'


@dataclass(frozen=True)
class BlockInput:
    """What a client sends over one connection, and what engines answer."""

    name: str
    raw: bytes
    answer: bytes = b""
    """With its head."""
    is_internal: bool = False
    """For the internal port."""


def frame(body: bytes, status: int = 200, kind: bytes = b"application/json") -> bytes:
    """An engine's answer."""
    head = b"HTTP/1.1 %d X\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
    return head % (status, kind, len(body)) + body


class InputGenerator:
    """An endless series of inputs, the same for the same seed."""

    def __init__(self, seed: int, sizes: tuple[int, ...] = SIZES) -> None:
        self._random = random.Random(seed)
        self._sizes = sizes

    def build_input(self) -> BlockInput:
        """The next input."""
        build = self._random.choices(
            (self._build_request, self._build_answered, self._build_head, self._build_page),
            (10, 5, 2, 1),
        )[0]
        return build()

    # --- what clients send ---

    def _build_request(self) -> BlockInput:
        choice, size = self._random, self._random.choice(self._sizes)
        path = choice.choice([*BEGINS])
        field = choice.choice((*_FIELDS, *_OTHER_FIELDS, *_MAIN_FIELDS * 8))
        place, (kind, value) = choice.choice(_PLACES), self._fill(size)
        member = b'"%b":%b' % (field.encode(), place.replace(b"%b", value))
        begin = BEGINS[path]
        if choice.random() < 0.5:
            # Only where it comes first is a repeated field read.
            begin = begin.replace(b'"%b":' % field.encode(), b'"other":')
        last = b'"stream":true}' if choice.random() < 0.3 else b'"user":"a"}'
        body = begin + member + b"," + last
        if choice.random() < 0.1:
            body = b'{"model":"m",%b,"user":"a"}' % (value[1:-1] or b'"a":0')
        if choice.random() < 0.1:
            body = body[: choice.randrange(len(body))]
        name = f"{path.decode()} {field}={place.decode()[:60]} {kind}, {len(body)} bytes"
        return BlockInput(name, self._send(path, body), frame(WHOLE_ANSWER))

    def _send(self, path: bytes, body: bytes) -> bytes:
        head = b"POST %b HTTP/1.1\r\nhost: g\r\nconnection: close\r\n" % path
        if self._random.random() < 0.8:
            return head + b"content-length: %d\r\n\r\n" % len(body) + body
        size = self._random.choice((1, 7, 1_000, 100_000)) if len(body) < 1 << 18 else 5_000
        return head + b"transfer-encoding: chunked\r\n\r\n" + _cut(body, size)

    def _build_head(self) -> BlockInput:
        choice = self._random
        lines, path, rest = b"", b"/v1/completions", b""
        kind = choice.choice(("many", "long", "path", "digits", "pipelined", "trailers"))
        count = choice.choice((10, 1_000, 3_000, 20_000))
        if kind == "many":
            line = choice.choice(_HEADER_LINES)
            lines = b"".join([line % n if b"%" in line else line for n in range(count)])
        elif kind == "long":
            lines = b"%b: %b\r\n" % (choice.choice(_LONG_FIELDS), choice.choice(_TEXTS) * count)
        elif kind == "path":
            unit = choice.choice((b"%41a/", b"%", b"%f0%9f%98%80"))
            path = choice.choice((b"/", b"/v1/models/", b"http://")) + unit * count
        elif kind == "digits":
            lines = b"content-length: " + b"9" * count + b"\r\n"
        elif kind == "pipelined":
            rest = b"GET /x HTTP/1.1\r\nhost: g\r\n\r\n" * count
        else:
            lines, rest = (
                b"transfer-encoding: chunked\r\n",
                b"0\r\n" + b"x: y\r\n" * count + b"\r\n",
            )
        head = b"%b %b HTTP/1.1\r\nhost: g\r\nconnection: %b\r\n%b\r\n" % (
            choice.choice((b"GET", b"POST")),
            path,
            b"keep-alive" if kind == "pipelined" else b"close",
            lines,
        )
        return BlockInput(f"head: {kind} {lines[:60]!r} {count} times", head + rest)

    def _build_page(self) -> BlockInput:
        path, is_internal = self._random.choice(_PAGES), self._random.random() < 0.5
        raw = b"GET %b HTTP/1.1\r\nhost: g\r\nconnection: close\r\n\r\n" % path
        return BlockInput(f"{path.decode()} internal={is_internal}", raw, b"", is_internal)

    # --- what engines answer ---

    def _build_answered(self) -> BlockInput:
        choice, size = self._random, self._random.choice(self._sizes)
        path = choice.choice((*BEGINS, *_STREAMED * 3))
        is_stream = path in _STREAMED and choice.random() < 0.7
        options = b'"stream":true' if is_stream else b'"user":"a"'
        if choice.random() < 0.3:
            options += b',"n":2'
        elif choice.random() < 0.3:
            options += b',"return_token_ids":true'
        raw = self._send(path, BEGINS[path] + options + b"}")
        kind, answer = self._build_stream(size) if is_stream else self._build_whole(size)
        return BlockInput(f"{path.decode()} answered by {kind}, {len(answer)} bytes", raw, answer)

    def _build_whole(self, size: int) -> tuple[str, bytes]:
        choice, (kind, value) = self._random, self._fill(size)
        place = choice.choice(_WHOLE)
        body = place.replace(b"%b", value)
        status = choice.choice((200, 200, 200, 400, 404, 422, 500, 503))
        name = f"{status} {place.decode()[:60]} {kind}"
        if choice.random() < 0.3:
            head = b"HTTP/1.1 %d X\r\ntransfer-encoding: chunked\r\n" % status
            head += b"content-type: application/json\r\n\r\n"
            return f"{name} chunked", head + _cut(body, choice.choice((1, 50, 50_000)))
        return name, frame(body, status)

    def _build_stream(self, size: int) -> tuple[str, bytes]:
        choice, event = self._random, self._random.choice(_EVENTS)
        if choice.random() < 0.3:
            kind, value = self._fill(size)
            events = [event.replace(b'"a"', value)]
        else:
            count = size // (len(event) + 2) + 1
            kind = f"{count} events"
            events = [event.replace(b"%d", b"%d" % n) for n in range(count)]
        separator = choice.choice((b"\n\n", b"\n\n", b"\n\n", b"\r\n\r\n", b"\n"))
        body = separator.join([*events, b"data: [DONE]", b""])
        head = b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n"
        head += b"content-type: text/event-stream; charset=utf-8\r\n\r\n"
        each = choice.choice((1, 30, 200, 5_000, 1 << 20)) if size < 1 << 19 else 5_000
        return f"{kind} of {event.decode()[:90]}, chunks of {each}", head + _cut(body, each)

    # --- values ---

    def _fill(self, size: int) -> tuple[str, bytes]:
        """What it repeats, and a JSON value of about so many bytes, most of them valid."""
        choice = self._random
        kind = choice.choice(("text", "text", "list", "list", "list", "object", "deep", "rest"))
        if kind == "text":
            unit = choice.choice(_TEXTS)
            return f"text of {unit!r}", b'"%b"' % (unit * (size // len(unit)))
        if kind == "list":
            unit = choice.choice(_ITEMS)
            rows = choice.choice((1, 1, 1, 30))
            row = b"[%b]" % b",".join([unit] * (size // rows // (len(unit) + 1) + 1))
            return f"{rows} lists of {unit.decode()}", row if rows == 1 else b"[%b]" % b",".join(
                [row] * rows
            )
        if kind == "object":
            key, unit = choice.choice(_KEYS), choice.choice(_ITEMS)
            members = [
                (key % n if b"%" in key else key) + b":" + unit
                for n in range(size // (len(key) + len(unit) + 3) + 1)
            ]
            return f"members {key!r}: {unit.decode()}", b"{%b}" % b",".join(members)
        if kind == "deep":
            begin, end = choice.choice(
                ((b"[", b"]"), (b'{"a":', b"}"), (b"[0,", b"]"), (b"[", b""))
            )
            count = min(size // (len(begin) + 1), choice.choice((100, 1_000, size)))
            return f"{count} deep {begin!r}", begin * count + b"0" + end * count
        unit = choice.choice((b"9", b" ", b"0", b"\n", b"1e", b"-", b"\x00", b"/"))
        return f"{unit!r} repeated", unit * size + (b"0" if unit.isspace() else b"")


_STREAMED = (routes.CHAT_PATH, routes.COMPLETIONS_PATH, b"/v1/responses", b"/v1/messages")
_MAIN_FIELDS = (
    "messages", "prompt", "input", "tools", "include", "documents", "text_1", "tokens", "system",
    "stop", "response_format", "logit_bias",
)  # fmt: skip


def _cut(body: bytes, size: int) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join([b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces]) + b"0\r\n\r\n"


def build_handoff(boot_id: str, request_id: str) -> bytes:
    """The answer of a prefill engine."""
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[2, 3, 4]],
        "remote_engine_id": boot_id,
        "remote_request_id": f"cmpl-{request_id}-0-82a6113c",
        "remote_host": "127.0.0.1",
        "remote_port": 5601,
    }
    usage = {"prompt_tokens": 7, "total_tokens": 8, "completion_tokens": 1}
    return json.dumps({"choices": [], "usage": usage, "kv_transfer_params": params}).encode()
