"""Cross-origin resource sharing: lets pages of other origins call the gateway from a browser.

With `--allowed-origins` the server makes a `CorsConnection` for each client of its port; without,
plain connections, which contain nothing of this. Source: the Fetch standard, "CORS protocol".

What is hard: every response must name the origin, or the page cannot even read an error. So the
header lines are added where bytes leave for the client: to the head of each response, whether it is
the gateway's own, an engine's, a stream, or the error of a request that cannot be parsed. Only if
the head of the request itself cannot be read, its origin is not known.
"""

from http import HTTPStatus

from cleave.gateway.app.client_connection import ClientConnection, RequestHandler
from cleave.gateway.context import GatewayContext
from cleave.gateway.http import headers
from cleave.gateway.http.connection_limiter import ConnectionLimiter
from cleave.gateway.http.errors import GatewayError, build_error_headers
from cleave.gateway.http.headers import ORIGIN, REQUESTED_METHOD
from cleave.gateway.http.request_parser import HttpRequest

ANY_ORIGIN = "*"
PREFLIGHT_MAX_AGE_S = 600
"""How long browsers may keep the response to a preflight."""

_STATUS_LINE = b"HTTP/1.1 "
# `*` stands for every header but Authorization, which has to be named.
_PREFLIGHT_FIELDS = (
    b"access-control-allow-methods: GET, HEAD, POST\r\n"
    b"access-control-allow-headers: authorization, *\r\n"
    b"access-control-max-age: %d\r\n" % PREFLIGHT_MAX_AGE_S
)


class CorsPolicy:
    """The origins whose pages may read responses."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        """`origins`: as browsers send them, such as https://chat.example.com; or `*`: all."""
        self._allows_any = ANY_ORIGIN in origins
        self._origins = frozenset(map(str.encode, origins))

    def allows(self, origin: bytes) -> bool:
        """Whether pages of this origin may read responses; origins are compared as a whole."""
        return self._allows_any or origin in self._origins

    def build_fields(self, origin: bytes | None) -> bytes:
        """The header lines of a response; `origin`: of the request, None: not known or not sent."""
        if self._allows_any:
            return b"access-control-allow-origin: *\r\naccess-control-expose-headers: *\r\n"
        if origin is None or origin not in self._origins:
            return b"vary: origin\r\n"
        return (
            b"access-control-allow-origin: %b\r\naccess-control-expose-headers: *\r\n"
            b"vary: origin\r\n" % origin
        )


class CorsConnection(ClientConnection):
    """A client whose responses name the origin that may read them."""

    def __init__(
        self,
        context: GatewayContext,
        handler: RequestHandler,
        limiter: ConnectionLimiter,
        policy: CorsPolicy,
    ) -> None:
        super().__init__(context, _CorsHandler(context, handler, policy), limiter)
        self._policy = policy
        self._fields = b""
        """Header lines to add to the next head."""

    def expect_response(self, request: HttpRequest | None) -> None:
        """The next head is that of the response to `request`; None: it could not be parsed."""
        self._fields = self._policy.build_fields(request.headers.get(ORIGIN) if request else None)

    def write(self, data: bytes | memoryview) -> None:
        """Send bytes of the response, its head with the header lines for the origin."""
        if self._fields and data[: len(_STATUS_LINE)] == _STATUS_LINE:
            line, end, rest = bytes(data).partition(b"\r\n")
            data = b"%b%b%b%b" % (line, end, self._fields, rest)
            self._fields = b""
        super().write(data)

    def reject(self, error: GatewayError, request: HttpRequest | None = None) -> None:
        """Send an error response, and close; as of all clients."""
        self.expect_response(request or self._reader.rejected)
        super().reject(error, request)


class _CorsHandler:
    """Responds to preflights; all other requests go to the handler of the port."""

    def __init__(
        self, context: GatewayContext, handler: RequestHandler, policy: CorsPolicy
    ) -> None:
        self._context = context
        self._handler = handler
        self._policy = policy

    def check(self, request: HttpRequest) -> GatewayError | None:
        """Validate the head of a request whose body is still to come."""
        return None if _is_preflight(request) else self._handler.check(request)

    def handle(self, client: ClientConnection, request: HttpRequest) -> None:
        """Respond to a preflight, or let the handler respond."""
        assert isinstance(client, CorsConnection)
        client.expect_response(request)
        if _is_preflight(request):
            self._respond_to_preflight(client, request)
        else:
            self._handler.handle(client, request)

    def record_response(self, request_id: bytes, status: int, request: HttpRequest | None) -> None:
        """Record a response that no engine gave."""
        self._handler.record_response(request_id, status, request)

    def _respond_to_preflight(self, client: CorsConnection, request: HttpRequest) -> None:
        """Browsers send no key with a preflight, so it needs none."""
        origin = request.headers[ORIGIN]
        request_id = self._context.make_request_id()
        if self._policy.allows(origin):
            # 200, because 204 must not have a Content-Length, which all responses here have.
            response = HTTPStatus.OK, _PREFLIGHT_FIELDS, b""
        else:
            error = build_origin_refused(origin)
            self._context.metrics.requests["", "refused"] += 1
            response = error.status, build_error_headers(error), error.to_json()
        self._handler.record_response(request_id, response[0], request)
        status, lines, body = response
        client.respond(status, lines, [body], request_id)


def _is_preflight(request: HttpRequest) -> bool:
    sent = request.headers
    return request.method == b"OPTIONS" and ORIGIN in sent and REQUESTED_METHOD in sent


def build_origin_refused(origin: bytes) -> GatewayError:
    """403: pages of this origin may not call."""
    name = headers.sanitize_header_value(origin.decode(errors="replace")).decode()
    message = (
        f"pages of {name} may not call this gateway: add the origin to --allowed-origins, or to "
        "spec.gateway.cors.allowedOrigins"
    )
    return GatewayError(HTTPStatus.FORBIDDEN, message, code="origin_not_allowed")
