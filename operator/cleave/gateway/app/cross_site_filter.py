"""Keeps web pages away from a gateway without keys on one machine.

With `--allowed-hosts`, which `cleave up` sets, the server puts it before the handlers of its HTTP
ports; without, nothing of this exists. What is hard: any page in a browser of this machine reaches
its loopback addresses. A page may send what browsers send without asking first (a form, a text) and
cannot read the answer; and the owner of a name may let it point here after its page was loaded (DNS
rebinding), so that the page reads answers as those of its own site. So the host that the browser
names must be one of ours, the page must be of the same origin or allowed by CORS, and a body must
be declared as JSON, which browsers ask for first.

Sources: RFC 9110, 7.2; the Fetch standard, "Origin header"; Fetch Metadata Request Headers.
"""

import ipaddress
import re
from http import HTTPStatus

from cleave.gateway.app.client_connection import ClientConnection, RequestHandler
from cleave.gateway.app.cors import CorsPolicy, build_origin_refused
from cleave.gateway.http import headers
from cleave.gateway.http.errors import GatewayError
from cleave.gateway.http.headers import (
    CONTENT_TYPE,
    FETCH_MODE,
    FETCH_SITE,
    HOST,
    JSON_TYPE,
    ORIGIN,
)
from cleave.gateway.http.request_parser import HttpRequest

_HOST = re.compile(rb"(\[[0-9a-f:.]+\]|[0-9a-z._-]+)(?::[0-9]{1,5})?")
_LOCAL_NAME = b"localhost"
_OTHER_SITES = (b"cross-site", b"same-site")
"""Pages of another port of this machine are of the same site."""
_NO_JSON = GatewayError(
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    "send the header Content-Type: application/json, which keeps pages of other sites away",
    code="unsupported_content_type",
)
_OTHER_SITE = GatewayError(
    HTTPStatus.FORBIDDEN,
    "pages of other sites may not call this gateway: add their origin to --allowed-origins, or to "
    "spec.gateway.cors.allowedOrigins",
    code="origin_not_allowed",
)


class CrossSiteFilter:
    """A handler before the handler of one port."""

    def __init__(
        self, handler: RequestHandler, hosts: tuple[str, ...], policy: CorsPolicy | None
    ) -> None:
        """`hosts`: names besides those of loopback addresses; `policy`: of pages that may call."""
        self._handler = handler
        self._hosts = frozenset(host.lower().encode() for host in hosts)
        self._policy = policy

    def check(self, request: HttpRequest) -> GatewayError | None:
        """Validate the head of a request whose body is still to come."""
        return self._find_refusal(request) or self._handler.check(request)

    def handle(self, client: ClientConnection, request: HttpRequest) -> None:
        """Let the handler respond, or refuse."""
        refusal = self._find_refusal(request)
        if refusal is None:
            self._handler.handle(client, request)
        else:
            client.reject(refusal, request)

    def record_response(self, request_id: bytes, status: int, request: HttpRequest | None) -> None:
        """Record a response that no engine gave."""
        self._handler.record_response(request_id, status, request)

    def _find_refusal(self, request: HttpRequest) -> GatewayError | None:
        sent = request.headers
        host = sent.get(HOST, b"").lower()
        if not self._is_own(host):
            return _build_host_refused(host)
        origin = sent.get(ORIGIN)
        if origin is not None:
            is_same = origin.lower().partition(b"://")[2] == host
            if not is_same and not (self._policy is not None and self._policy.allows(origin)):
                return build_origin_refused(origin)
        elif sent.get(FETCH_SITE) in _OTHER_SITES and not _is_navigation(request):
            return _OTHER_SITE
        kind = sent.get(CONTENT_TYPE, b"").partition(b";")[0].strip().lower()
        if request.method == b"POST" and kind != JSON_TYPE:
            # No path, or no method of it, is the better answer.
            return self._handler.check(request) or _NO_JSON
        return None

    def _is_own(self, host: bytes) -> bool:
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = match[1]
        return name in self._hosts or name == _LOCAL_NAME or _is_loopback(name.decode())


def _is_navigation(request: HttpRequest) -> bool:
    """A link that a user follows: no page reads the answer."""
    return request.method == b"GET" and request.headers.get(FETCH_MODE) == b"navigate"


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _build_host_refused(host: bytes) -> GatewayError:
    name = headers.sanitize_header_value(host.decode(errors="replace")[:64]).decode()
    message = (
        f"{name or 'no host'} is no name of this gateway: use localhost, let a proxy before it "
        "send Host: localhost, or add the name to --allowed-hosts"
    )
    return GatewayError(HTTPStatus.MISDIRECTED_REQUEST, message, code="host_not_allowed")
