"""Reads the fields of requests that are translated, and writes those of chats. Pure.

Used by `messages_request` and `responses_request`; errors name the field. What is hard: a hostile
body can consist of millions of tiny objects, or of one text of 16 MiB. So everything is read and
written in time slices: lists element by element, and texts are copied as the client's JSON, never
decoded. What need not be read, such as schemas and arguments of tools, stays the client's bytes.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from cleave.gateway.http.bounded_json import TooManyMembersError
from cleave.gateway.http.byte_buffer import ByteBuffer
from cleave.gateway.http.completion_request import (
    Body,
    Fields,
    FindModel,
    decode_fields,
    scan_fields,
)
from cleave.gateway.http.errors import GatewayError, build_bad_request
from cleave.gateway.http.large_json import MIN_BYTES, locate_elements, scan_members
from cleave.time_slices import Steps

MAX_ELEMENTS = 100_000
"""Limit of one list, such as the messages of a conversation or the parts of one message."""
MAX_MEMBERS = 64
"""Limit of the members of one object, such as a message."""
MAX_TOOLS = 4_096
"""Limit of the tools of one request."""
MAX_VALUE_BYTES = 4 << 10
"""Limit of values that are decoded."""
MAX_CONFIG_BYTES = 256 << 10
"""Limit of values that may contain schemas."""
_SHORT_LIST = 4_096
"""Elements of a list that is split at once, in half a millisecond."""
_SLICE_BYTES = 64 << 10
"""Bytes that are copied at a time."""

ENGINE_FIELDS = frozenset((
    "allowed_token_ids", "bad_words", "cache_salt", "chat_template_kwargs", "frequency_penalty",
    "ignore_eos", "include_reasoning", "include_stop_str_in_output", "logit_bias",
    "media_io_kwargs", "min_p", "min_tokens", "mm_processor_kwargs", "presence_penalty",
    "priority", "repetition_penalty", "seed", "session_id", "skip_special_tokens", "stop",
    "stop_token_ids", "structured_outputs", "temperature", "thinking_token_budget", "top_k",
    "top_p", "vllm_xargs", "watermarking",
))  # fmt: skip
"""Fields that mean the same in a chat completion and reach the engine unchanged."""

Piece = bytes | memoryview | msgspec.Raw
"""Of JSON."""
T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

_NULL = b"null"
_EMPTY = (b"[]", b"{}", b'""')
_EMPTY_BYTES = 64
EMPTY_TEXT = msgspec.Raw(b'""')
_FAULTS = msgspec.MsgspecError, UnicodeDecodeError, RecursionError

FLAG = msgspec.json.Decoder(bool)
INTEGER = msgspec.json.Decoder(int, strict=False)
"""As vLLM reads one: 4.0 and "4" are, 4.5 is not."""
TEXT = msgspec.json.Decoder(str)
TEXTS = msgspec.json.Decoder(list[str])
_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_encode = msgspec.json.Encoder().encode


class JsonText:
    """JSON that is written in time slices."""

    def __init__(self, begin: bytes = b"") -> None:
        self._buffer = ByteBuffer(begin)

    def __len__(self) -> int:
        return len(self._buffer)

    def add(self, *pieces: Piece) -> Steps[None]:
        """Append pieces, long ones in parts."""
        buffer = self._buffer
        for piece in pieces:
            view = memoryview(piece)
            if len(view) <= _SLICE_BYTES:
                buffer.add(view)
                continue
            for start in range(0, len(view), _SLICE_BYTES):
                buffer.add(view[start : start + _SLICE_BYTES])
                yield

    def add_quoted(self, before: bytes, text: msgspec.Raw, after: bytes) -> Steps[None]:
        """Append a text that contains this JSON, and what is before and after it."""
        buffer = self._buffer
        buffer.add(before + b'"')
        view = memoryview(text)
        for start in range(0, len(view), _SLICE_BYTES):
            if start:
                yield
            # Outside texts, JSON has no other characters that a text must not contain.
            part = bytes(view[start : start + _SLICE_BYTES]).replace(b"\\", b"\\\\")
            part = part.replace(b'"', b'\\"').replace(b"\n", b"\\n").replace(b"\r", b"\\r")
            buffer.add(part.replace(b"\t", b"\\t"))
        buffer.add(b'"' + after)

    def end_list(self) -> msgspec.Raw:
        """The list that was begun with its bracket, and whose elements, if there are any, each have
        a comma after them; nothing can be appended to it."""
        if len(self._buffer) > 1:
            self._buffer.drop_last()
        return self.to_raw(b"]")

    def to_raw(self, end: bytes = b"") -> msgspec.Raw:
        """What was written, and its end; nothing can be appended afterwards."""
        self._buffer.add(end)
        return msgspec.Raw(self._buffer.take())


class JoinedText:
    """One text that is joined of several; a single one stays where it is."""

    def __init__(self, separator: bytes = b"") -> None:
        """`separator`: as it is written in JSON."""
        self._separator = separator
        self._first = EMPTY_TEXT
        self._joined: JsonText | None = None
        self.count = 0

    def add(self, text: msgspec.Raw) -> Steps[None]:
        """Append a text."""
        self.count += 1
        if self.count == 1:
            self._first = text
            return
        if self._joined is None:
            self._joined = JsonText(b'"')
            yield from self._joined.add(memoryview(self._first)[1:-1])
        yield from self._joined.add(self._separator, memoryview(text)[1:-1])

    def to_raw(self) -> msgspec.Raw:
        """The text; nothing can be appended afterwards."""
        return self._first if self._joined is None else self._joined.to_raw(b'"')


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of models, by their names."""

    system_first: Container[str] = ()
    """Their chat templates demand that the first message is the only one of the system."""
    always_thinks: Callable[[str], bool] = lambda _: False
    """Their chat templates do not switch thinking off."""
    find_only: FindModel = lambda: ""
    """The only model that is served; empty: there are several."""


class SystemText:
    """The system messages of a conversation, if templates demand that there is one, at the
    beginning."""

    def __init__(self, fields: Fields, facts: ModelFacts) -> None:
        self.is_merged = decode_field(fields, "model", TEXT, "") in facts.system_first
        self.is_late = False
        """Whether there is one that is not at the beginning."""
        self.text = JoinedText(b"\\n\\n")

    def prepend(self, messages: msgspec.Raw) -> Steps[msgspec.Raw]:
        """The messages of a chat after what was merged."""
        if not self.text.count:
            return messages
        written = JsonText(b'[{"role":"system","content":')
        yield from written.add(self.text.to_raw(), b"}" if messages == b"[]" else b"},")
        yield from written.add(memoryview(messages)[1:])
        return written.to_raw()


def read_request(body: Body) -> Steps[Fields]:
    """The fields of a request, those that are null left out. Raises GatewayError (400)."""
    fields = decode_fields(body) if len(body) <= MIN_BYTES else (yield from scan_fields(body))
    return {name: raw for name, raw in fields.items() if not is_null(raw)}


def refuse_fields(fields: Fields, refused: dict[str, str]) -> None:
    """Refuse fields that change the answer and cannot be honoured, unless they are empty; unknown
    ones are left out. Raises GatewayError (400). `refused`: by name, what to do instead."""
    for name in refused.keys() & fields.keys():
        if bytes(memoryview(fields[name])[:_EMPTY_BYTES]).translate(None, b" \t\r\n") not in _EMPTY:
            raise build_bad_request(f"{name} is not supported: {refused[name]}", name)


def copy_engine_fields(fields: Fields) -> Fields:
    """The fields that reach the engine unchanged, and `model`, `stream` and its usage."""
    chat = {name: raw for name, raw in fields.items() if name in ENGINE_FIELDS}
    if "model" in fields:
        chat["model"] = fields["model"]
    if decode_field(fields, "stream", FLAG, False):
        chat["stream"] = msgspec.Raw(b"true")
        chat["stream_options"] = msgspec.Raw(b'{"include_usage":true}')
    return chat


def encode_raw(value: object) -> msgspec.Raw:
    """A value as JSON."""
    return msgspec.Raw(_encode(value))


def decode_field(
    fields: Fields,
    name: str,
    decoder: msgspec.json.Decoder[T],
    default: T,
    limit: int = MAX_VALUE_BYTES,
) -> T:
    """A field's short value, or the default if it is absent. Raises GatewayError (400)."""
    if name not in fields:
        return default
    if len(fields[name]) > limit:
        raise build_bad_request(f"{name} is longer than {limit} bytes", name)
    try:
        return decoder.decode(fields[name])
    except _FAULTS as error:
        raise _build_fault(error, name) from None


def check_text(raw: msgspec.Raw, path: str) -> msgspec.Raw:
    """A text of any length, as JSON; empty for null. Raises GatewayError (400)."""
    if bytes(memoryview(raw)[:1]) == b'"':
        return raw
    if is_null(raw):
        return EMPTY_TEXT
    raise build_bad_request(f"{path}: Expected `str`", path)


def read_tool_name(raw: msgspec.Raw, path: str, num_tools: int) -> str:
    """The name of a tool after so many others. Raises GatewayError (400)."""
    if num_tools >= MAX_TOOLS:
        raise build_bad_request(f"{path} is one of more than {MAX_TOOLS} tools", path)
    name = check_text(raw, path)
    if name == EMPTY_TEXT or len(name) > MAX_VALUE_BYTES:
        message = f"{path} must name the tool, in at most {MAX_VALUE_BYTES} bytes"
        raise build_bad_request(message, path)
    return TEXT.decode(name)


def is_text(raw: msgspec.Raw) -> bool:
    """Whether it is a text; its end was found where it begins."""
    return bytes(memoryview(raw)[:1]) == b'"'


def is_list(raw: msgspec.Raw) -> bool:
    """Whether it is a list."""
    return bytes(memoryview(raw)[:1]) == b"["


def is_null(raw: msgspec.Raw) -> bool:
    """Whether it is null."""
    return bytes(memoryview(raw)[:4]) == _NULL


class ObjectReader(Generic[S]):
    """Reads objects as structs, whose members that may be long are JSON."""

    def __init__(self, struct: type[S]) -> None:
        self._names = frozenset(struct.__struct_fields__)
        self._decode = msgspec.json.Decoder(struct).decode

    def read(self, raw: msgspec.Raw, path: str) -> Steps[S]:
        """An object of any length. Raises GatewayError (400)."""
        try:
            if len(raw) <= MIN_BYTES:
                return self._decode(raw)
            return (yield from self._read_members(raw))
        except TooManyMembersError:
            message = f"{path} has more than {MAX_MEMBERS} members"
            raise build_bad_request(message, path) from None
        except _FAULTS as error:
            raise _build_fault(error, path) from None

    def _read_members(self, raw: msgspec.Raw) -> Steps[S]:
        members = yield from scan_members(raw, MAX_MEMBERS)
        known = {name: value for name, value in members.items() if name in self._names}
        long = {name: value for name, value in known.items() if len(value) > MAX_VALUE_BYTES}
        # With texts in place of the long ones, the struct shows which members may be long.
        struct = self._decode(_encode(known | dict.fromkeys(long, EMPTY_TEXT)))
        for name, value in long.items():
            if not isinstance(getattr(struct, name), msgspec.Raw):
                raise msgspec.ValidationError(
                    f"longer than {MAX_VALUE_BYTES} bytes - at `$.{name}`"
                )
            setattr(struct, name, value)
        return struct


def read_list(raw: msgspec.Raw, path: str) -> Steps[Sequence[msgspec.Raw]]:
    """The elements of a list, each found when it is accessed. Raises GatewayError (400), and
    msgspec.DecodeError when an element is accessed that is missing."""
    try:
        if len(raw) <= MIN_BYTES and bytes(raw).count(b",") < _SHORT_LIST:
            return _LIST.decode(raw)
        return (yield from locate_elements(raw, MAX_ELEMENTS))
    except TooManyMembersError:
        message = f"{path} has more than {MAX_ELEMENTS} elements: shorten the conversation"
        raise build_bad_request(message, path) from None
    except _FAULTS as error:
        raise _build_fault(error, path) from None


def build_unsupported(path: str, value: str, allowed: str) -> GatewayError:
    """400: a value that this gateway does not support."""
    return build_bad_request(f"{path} {value[:80]!r} is not supported: use {allowed}", path)


def _build_fault(error: Exception, path: str) -> GatewayError:
    fault, _, place = str(error).partition(" - at `$")
    path += place.removesuffix("`")
    return build_bad_request(f"{path}: {fault}", path)
