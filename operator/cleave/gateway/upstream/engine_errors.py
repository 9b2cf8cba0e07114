"""Engines' errors in the form of all other errors of the gateway. Pure.

Used for responses (`proxy.proxied_request`) and for events of streams (`proxy.sse_relay`). vLLM
writes `{"error": {"type": "BadRequestError", "code": 400, ...}}`, its framework `{"detail": ...}`,
and engines of other versions have the members of `error` at the first level. Clients of the OpenAI
API read OpenAI's own vocabulary: types in lower case, and codes that are texts or null.
"""

from http import HTTPStatus
from typing import Any

import msgspec

from cleave.gateway.http.errors import GatewayError

MAX_MESSAGE_CHARACTERS = 4_096
"""Longer messages are cut: vLLM's may quote the whole request."""

_DATA = b"data: "


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
    message = _describe(fields) or body.decode(errors="replace").strip()
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
    return bool(_decode(body))


def convert_error_event(event: bytes) -> bytes:
    """An error event `data: {"error": ...}` without the empty line after it."""
    body = event.removeprefix(_DATA)
    error = _decode(body).get("error")
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) else HTTPStatus.BAD_REQUEST.value
    converted = convert_engine_error(status, body)
    return event if converted is None else _DATA + converted.to_json()


def _decode(body: bytes) -> dict[str, Any]:
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


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
