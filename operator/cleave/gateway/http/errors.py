"""Errors in the OpenAI API's form, for clients. Raised while a request is read, built when an
engine fails.

All client libraries of the OpenAI API read `{"error": {"message", "type", "param", "code"}}`.
"""

from dataclasses import dataclass, replace
from http import HTTPStatus

import msgspec

from cleave.gateway.http.headers import JSON_CONTENT
from cleave.router.errors import NoInstance, QueueFull, RouterError, UnknownModel


@dataclass(eq=False)
class GatewayError(Exception):
    """The error response to a client."""

    status: HTTPStatus
    message: str
    type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    retry_after_s: int | None = None
    header_lines: bytes = b""
    """Additional header lines."""

    def to_json(self) -> bytes:
        """The body of the response, and the data of an error event in a stream."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def build_error_headers(error: GatewayError) -> bytes:
    """The header lines of an error response."""
    fields = JSON_CONTENT + error.header_lines
    if error.retry_after_s is None:
        return fields
    return b"%bretry-after: %d\r\n" % (fields, error.retry_after_s)


def build_bad_request(message: str, param: str | None = None) -> GatewayError:
    """400: the request is invalid."""
    return GatewayError(HTTPStatus.BAD_REQUEST, message, param=param)


def build_payload_too_large(limit_bytes: int) -> GatewayError:
    """413: the body is too large."""
    message = f"the body is larger than {limit_bytes} bytes"
    return GatewayError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="body_too_large")


UNAUTHORIZED = GatewayError(
    HTTPStatus.UNAUTHORIZED,
    "no valid API key: send it as `Authorization: Bearer KEY`",
    code="invalid_api_key",
    header_lines=b"www-authenticate: Bearer\r\n",
)
"""The request has no key."""

WRONG_KEY = replace(UNAUTHORIZED)
"""The request has a key, but not one of this gateway."""

TOO_MANY_WRONG_KEYS = GatewayError(
    HTTPStatus.TOO_MANY_REQUESTS,
    "too many wrong API keys have come: further ones are answered late, right ones at once",
    "rate_limit_error",
    code="too_many_wrong_keys",
    retry_after_s=10,
)

RECEIVE_LIMIT_REACHED = GatewayError(
    HTTPStatus.SERVICE_UNAVAILABLE,
    "too many large requests are being received and served at once: retry",
    "server_error",
    code="receiving_too_much",
    retry_after_s=1,
)
"""The buffer budget has no room for the request."""

INTERNAL_FAULT = GatewayError(
    HTTPStatus.INTERNAL_SERVER_ERROR,
    "a fault of the gateway has ended this request: its log says where",
    "server_error",
    code="internal_error",
)


def build_engine_error(status: HTTPStatus, message: str) -> GatewayError:
    """502 or 504: an engine failed."""
    code = "engine_timeout" if status is HTTPStatus.GATEWAY_TIMEOUT else "engine_error"
    return GatewayError(status, message, "server_error", code=code)


HANDOFF_LEAK = build_engine_error(HTTPStatus.BAD_GATEWAY, "the engine's response cannot be relayed")
"""The response contains a handoff that cannot be removed."""

RESPONSE_TOO_LONG = build_engine_error(
    HTTPStatus.BAD_GATEWAY,
    "the answer is larger than the gateway buffers: stream it, or request fewer choices or "
    "log-probabilities",
)
"""A response that is not streamed exceeds its limit, or the room in the buffer budget."""

EVENT_TOO_LONG = build_engine_error(
    HTTPStatus.BAD_GATEWAY,
    "an event of the stream is larger than the gateway buffers: leave log-probabilities, `echo` "
    "and `return_token_ids` out, or do not stream",
)
"""An event of a stream exceeds its limit, or the room in the buffer budget."""

RESPONSE_TOO_SLOW = build_engine_error(
    HTTPStatus.GATEWAY_TIMEOUT,
    "the answer takes longer than the gateway waits for it, though an engine works on it: stream "
    "it, send a shorter prompt, or request fewer tokens or choices",
)
"""A response is not complete, or a stream has not begun, in time, though its engine works."""

ADAPTER_CHANGED = build_engine_error(
    HTTPStatus.BAD_GATEWAY,
    "the adapter was loaded from another source in the meantime: send the request again",
)
"""A stream that began with one source of its adapter cannot be continued with another."""

SUSPECT_REQUEST = GatewayError(
    HTTPStatus.BAD_GATEWAY,
    "engines ended while they ran this request, so it is refused for some minutes: "
    "change it, or report it",
    "server_error",
    code="suspect_request",
)
"""The request probably ended the engines that ran it."""

SUSPECT_SENDER = GatewayError(
    HTTPStatus.SERVICE_UNAVAILABLE,
    "your requests have ended engines, so for some minutes they get one engine at a time, "
    "and that one is not available now",
    "server_error",
    code="suspect_sender",
    retry_after_s=5,
)
"""Other senders are served meanwhile."""


REDACTED_REJECTION = build_bad_request("the engine refused the request")
"""An engine's rejection without its message, because the message quotes a handoff."""


def is_unknown_route(status: int, body: bytes) -> bool:
    """Whether an engine does not have this path; errors of its API have another form."""
    return status in (404, 405) and (not body.startswith(b"{") or body.startswith(b'{"detail"'))


def build_not_offered(path: bytes, model: str) -> GatewayError:
    """501: the path exists, but not for this model."""
    message = f"the engine of model {model!r} does not offer {path.decode('ascii', 'replace')}"
    return GatewayError(HTTPStatus.NOT_IMPLEMENTED, message, code="not_offered_by_engine")


_RETRYABLE: dict[type[RouterError], tuple[HTTPStatus, str, str]] = {
    QueueFull: (HTTPStatus.TOO_MANY_REQUESTS, "rate_limit_error", "queue_full"),
    NoInstance: (HTTPStatus.SERVICE_UNAVAILABLE, "server_error", "no_instance"),
}


def convert_router_error(error: RouterError) -> GatewayError:
    """Convert the router's errors to HTTP errors."""
    if isinstance(error, UnknownModel):
        status = HTTPStatus.NOT_FOUND
        return GatewayError(status, str(error), code="model_not_found", param="model")
    if type(error) not in _RETRYABLE:
        raise error
    status, kind, code = _RETRYABLE[type(error)]
    return GatewayError(status, str(error), kind, code, retry_after_s=1)
