"""Errors in the OpenAI API's form, for clients. Raised while a request is read, built when an
engine fails.

All client libraries of the OpenAI API read `{"error": {"message", "type", "param", "code"}}`.
"""

import http
from dataclasses import dataclass

import msgspec

from cleave.gateway.http.headers import JSON_CONTENT
from cleave.router.errors import NoInstance, QueueFull, RouterError, UnknownModel


@dataclass(eq=False)
class GatewayError(Exception):
    """The error response to a client."""

    status: http.HTTPStatus
    message: str
    type: str
    code: str | None = None
    param: str | None = None
    retry_after_s: int | None = None
    header_lines: bytes = b""
    """Additional header lines."""

    def to_json(self) -> bytes:
        """The body of the response, and the data of an error event in a stream."""
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": self.type,
                    "param": self.param,
                    "code": self.code,
                }
            }
        )


def build_error_headers(error: GatewayError) -> bytes:
    """The header lines of an error response."""
    fields = JSON_CONTENT + error.header_lines
    if error.retry_after_s is None:
        return fields
    return b"%bretry-after: %d\r\n" % (fields, error.retry_after_s)


def build_bad_request(
    message: str, param: str | None = None, code: str | None = None
) -> GatewayError:
    """400: the request is invalid."""
    return GatewayError(
        http.HTTPStatus.BAD_REQUEST, message, "invalid_request_error", code=code, param=param
    )


def build_payload_too_large(limit_bytes: int) -> GatewayError:
    """413: the body is too large."""
    return GatewayError(
        http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"the body is larger than {limit_bytes} bytes",
        "invalid_request_error",
        code="body_too_large",
    )


def build_engine_error(status: http.HTTPStatus, message: str) -> GatewayError:
    """502 or 504: an engine failed."""
    code = "engine_timeout" if status is http.HTTPStatus.GATEWAY_TIMEOUT else "engine_error"
    return GatewayError(status, message, "server_error", code=code)


HANDOFF_LEAK = build_engine_error(
    http.HTTPStatus.BAD_GATEWAY, "the engine's response cannot be relayed"
)
"""The response contains a handoff that cannot be removed."""


def redact_engine_rejection(status: int) -> GatewayError:
    """An engine's rejection without its message, because the message quotes a handoff."""
    refused = http.HTTPStatus(status)
    return GatewayError(refused, "the engine refused the request", "invalid_request_error")


def is_unknown_route(status: int, body: bytes) -> bool:
    """Whether an engine does not have this path; errors of its API have another form."""
    return status in (404, 405) and (not body.startswith(b"{") or body.startswith(b'{"detail"'))


def build_not_offered(path: bytes, model: str) -> GatewayError:
    """501: the path exists, but not for this model."""
    return GatewayError(
        http.HTTPStatus.NOT_IMPLEMENTED,
        f"the engine of model {model!r} does not offer {path.decode('ascii', 'replace')}",
        "invalid_request_error",
        code="not_offered_by_engine",
    )


def convert_router_error(error: RouterError) -> GatewayError:
    """Convert the router's errors to HTTP errors."""
    status = http.HTTPStatus
    match error:
        case UnknownModel():
            return GatewayError(
                status.NOT_FOUND,
                str(error),
                "invalid_request_error",
                code="model_not_found",
                param="model",
            )
        case QueueFull():
            return GatewayError(
                status.TOO_MANY_REQUESTS,
                str(error),
                "rate_limit_error",
                code="queue_full",
                retry_after_s=1,
            )
        case NoInstance():
            return GatewayError(
                status.SERVICE_UNAVAILABLE,
                str(error),
                "server_error",
                code="no_instance",
                retry_after_s=1,
            )
        case _:
            raise error
