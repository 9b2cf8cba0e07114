"""Engines' errors in the form of all other errors of the gateway. Pure.

Used for responses (`proxy.proxied_request`) and for events of streams (`proxy.sse_relay`). vLLM
writes `{"error": {"type": "BadRequestError", "code": 400, ...}}`, its framework `{"detail": ...}`,
and engines of other versions have the members of `error` at the first level. Clients of the OpenAI
API read OpenAI's own vocabulary: types in lower case, and codes that are texts or null. What is
hard: an error may quote the whole request, so only what is read of it is decoded.
"""

import contextlib
from http import HTTPStatus
from typing import Any

import msgspec

from cleave.gateway.http.errors import GatewayError
from cleave.gateway.upstream.collected_answer import AnswerBody

MAX_MESSAGE_CHARACTERS = 4_096
"""Longer messages are cut: vLLM's may quote the whole request."""

MAX_VALUE_BYTES = 4 * MAX_MESSAGE_CHARACTERS
"""Of longer values the beginning is shown as the engine wrote it."""
MAX_DECODED_BYTES = 256 << 10
"""Longer errors are not decoded at all."""

_DATA = b"data: "
_ABSENT = msgspec.Raw()


class _Members(msgspec.Struct):
    """What is read of an error."""

    error: msgspec.Raw = _ABSENT
    type: msgspec.Raw = _ABSENT
    code: msgspec.Raw = _ABSENT
    param: msgspec.Raw = _ABSENT
    message: msgspec.Raw = _ABSENT
    detail: msgspec.Raw = _ABSENT


_decode_members = msgspec.json.Decoder(_Members).decode


def convert_engine_error(status: int, body: bytes) -> GatewayError | None:
    """The error for the client; None: relay the body as it is, because it is in Anthropic's form,
    which clients of /v1/messages read, or no error at all."""
    if status < HTTPStatus.BAD_REQUEST:
        return None
    decoded = _decode(body)
    if decoded.get("type") == "error":
        return None
    error = decoded.get("error", decoded)
    fields: dict[str, Any] = error if isinstance(error, dict) else {"message": error}
    message = _describe(fields) or _begin(body).strip()
    param, code = fields.get("param"), fields.get("code")
    known = _find_status(status)
    if known is HTTPStatus.NOT_FOUND and param == "model":
        code = "model_not_found"
    return GatewayError(
        known,
        _cut(message) or f"the engine refused the request with status {status}",
        _convert_type(fields.get("type"), known),
        code=code if isinstance(code, str) else None,
        param=param if isinstance(param, str) else None,
    )


def is_rejection(body: bytes) -> bool:
    """Whether a body is one of an engine's own errors: a JSON object."""
    if len(body) > MAX_DECODED_BYTES:
        return body[:1] == b"{" and body[-1:] == b"}"
    return _scan(body) is not None and body.strip() != b"{}"


def cut_error(body: AnswerBody) -> bytes:
    """As much of an error as is read of it: of a large one its beginning and its end."""
    if isinstance(body, bytes):
        return body
    return body.read(0, MAX_DECODED_BYTES) + body.read(len(body) - 1, len(body))


def convert_error_event(event: bytes) -> bytes:
    """An error event `data: {"error": ...}` without the empty line after it."""
    body = event.removeprefix(_DATA)
    error = _decode(body).get("error")
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) else HTTPStatus.BAD_REQUEST.value
    converted = convert_engine_error(status, body)
    return event if converted is None else _DATA + converted.to_json()


def _scan(data: bytes | msgspec.Raw) -> _Members | None:
    try:
        members: _Members = _decode_members(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return members


def _decode(data: bytes | msgspec.Raw, depth: int = 2) -> dict[str, Any]:
    """The members of an error, to this depth."""
    members = _scan(data) if len(data) <= MAX_DECODED_BYTES else None
    if members is None:
        return {}
    return {
        name: _decode_value(raw, depth - 1)
        for name, raw in msgspec.structs.asdict(members).items()
        if raw is not _ABSENT
    }


def _decode_value(raw: msgspec.Raw, depth: int) -> object:
    if len(raw) <= MAX_VALUE_BYTES:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return msgspec.json.decode(raw)
    return (depth and _decode(raw, depth)) or _begin(raw)


def _begin(raw: bytes | msgspec.Raw) -> str:
    return bytes(memoryview(raw)[:MAX_VALUE_BYTES]).decode(errors="replace")


def _describe(fields: dict[str, Any]) -> str:
    """The message, or FastAPI's `detail`: a text, or a list of faults."""
    message = fields.get("message") or fields.get("detail")
    if isinstance(message, list):
        return "; ".join(map(_describe_fault, message))
    return message if isinstance(message, str) else ""


def _describe_fault(fault: object) -> str:
    """`body.stop: must be a text` of FastAPI's {"loc": ["body", "stop"], "msg": ...}."""
    if not isinstance(fault, dict):
        return str(fault)
    place = fault.get("loc")
    field = ".".join(map(str, place)) if isinstance(place, list) else ""
    message = str(fault.get("msg", "is not valid"))
    return f"{field}: {message}" if field else message


def _convert_type(kind: object, status: HTTPStatus) -> str:
    if isinstance(kind, str) and kind.endswith("_error"):
        return kind
    if status is HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    return "invalid_request_error"


def _find_status(status: int) -> HTTPStatus:
    try:
        return HTTPStatus(status)
    except ValueError:
        return HTTPStatus.BAD_REQUEST


def _cut(message: str) -> str:
    if len(message) <= MAX_MESSAGE_CHARACTERS:
        return message
    return message[:MAX_MESSAGE_CHARACTERS] + " ..."
