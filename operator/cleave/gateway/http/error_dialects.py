"""Errors in the form that the clients of a path read. Pure.

Clients of /v1/messages read Anthropic's `{"type": "error", "error": {"type", "message"}}`; all
others read OpenAI's. Used wherever an error leaves for a client: by the handlers, the client
connections and the translations.
"""

from http import HTTPStatus

import msgspec

from cleave.gateway.http.errors import GatewayError

MESSAGES_PATH = b"/v1/messages"
COUNT_TOKENS_PATH = b"/v1/messages/count_tokens"
ANTHROPIC_PATHS = (MESSAGES_PATH, COUNT_TOKENS_PATH)
_ANTHROPIC_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}
"""By status; other statuses below 500 are invalid requests, others from 500 on API errors."""


def encode_error(error: GatewayError, path: bytes) -> bytes:
    """The body of an error response to a request to `path`."""
    if path in ANTHROPIC_PATHS:
        return build_anthropic_error(name_anthropic_type(error.status), error.message)
    return error.to_json()


def name_anthropic_type(status: int) -> str:
    """Anthropic's type of an error with this status."""
    default = "invalid_request_error" if status < 500 else "api_error"
    return next((name for known, name in _ANTHROPIC_TYPES.items() if known == status), default)


def build_anthropic_error(kind: str, message: str) -> bytes:
    """An error in Anthropic's form."""
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})
