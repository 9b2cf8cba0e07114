"""Handlers of all paths of the gateway: its own GET paths, and the POST paths that go to engines.

Used by the client connections. What is hard: if the gateway has API keys, a client without one
must not learn names of models, instances or tenants, but probes send no key (`pages`). Scrapers
send a key or use the internal port, which no Service exposes. /fleet describes every instance and
its load, which only the operator needs: it exists on the internal port only, and so does /metrics
when there are several tenants, because it shows the traffic of each.
"""

from collections.abc import Container
from functools import partial
from http import HTTPStatus
from urllib.parse import unquote

from cleave.gateway.admission.tenants import DEFAULT_TENANT, Tenant
from cleave.gateway.app import routes
from cleave.gateway.app.client_connection import ClientConnection
from cleave.gateway.app.pages import Pages
from cleave.gateway.app.shared_page import BuiltPage, PageRequest
from cleave.gateway.context import GatewayContext
from cleave.gateway.event_loop_faults import contain, end_after
from cleave.gateway.http import headers
from cleave.gateway.http.completion_request import (
    parse_completion,
    parse_engine_request,
    raise_priority,
)
from cleave.gateway.http.error_dialects import encode_error
from cleave.gateway.http.errors import (
    TOO_MANY_WRONG_KEYS,
    UNAUTHORIZED,
    WRONG_KEY,
    GatewayError,
    build_error_headers,
    convert_router_error,
)
from cleave.gateway.http.request_parser import HttpRequest
from cleave.gateway.proxy.client_stream import ClientStream
from cleave.gateway.proxy.proxied_request import ProxiedRequest
from cleave.gateway.proxy.translated_client import TranslatedClient
from cleave.gateway.tracing.recorder import RequestRecorder
from cleave.gateway.translation.request_fields import ModelFacts
from cleave.gateway.translation.translations import TRANSLATORS, Translation
from cleave.gateway.upstream.suspect_senders import get_sender
from cleave.router.errors import UnknownModel
from cleave.time_slices import Steps, run_at_once

_OTHER_PATHS = frozenset(route.path for route in routes.OTHER_ROUTES)
_POST_ROUTES = routes.COMPLETION_ROUTES + routes.TRANSLATED_ROUTES + routes.OTHER_ROUTES
_METHODS = {route.path: b"POST" for route in _POST_ROUTES} | {
    route.path: b"GET" for route in routes.OWN_ROUTES
}
_PUBLIC_PATHS = frozenset(route.path for route in routes.OWN_ROUTES if not route.needs_key)
_INTERNAL_METHODS = {route.path: b"GET" for route in routes.INTERNAL_ROUTES}
_UNLOGGED = frozenset((*_INTERNAL_METHODS, routes.OPENAPI_PATH))
"""Paths that probes and scrapers request."""

MAX_PATH_BYTES = 4_096
"""No longer path exists."""
_QUOTED_BYTES = 256
"""Of a path, in an error message."""
LARGE_BODY_BYTES = 256 << 10
"""Larger requests are read in time slices."""
SHORT_TRANSLATED_BYTES = 4 << 10
"""Of requests that are translated, larger ones are read in time slices."""
_HAS_ENDED = True
"""A computation that could be interrupted is one that takes long."""
_ENCODED_BODY = GatewayError(
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    "bodies with Content-Encoding, such as gzip, are not supported: send JSON as it is",
    code="unsupported_content_encoding",
    header_lines=b"accept-encoding: identity\r\n",
)
_INTERNAL_ONLY = GatewayError(
    HTTPStatus.FORBIDDEN,
    "/metrics shows all tenants, so it is available on the port of --internal-port only",
    code="internal_only",
)


class GatewayRequestHandler:
    """Handles the requests of one port."""

    def __init__(
        self,
        context: GatewayContext,
        recorder: RequestRecorder | None = None,
        *,
        internal: bool = False,
    ) -> None:
        """`recorder`: records requests for logs and traces; `internal`: for the internal port."""
        self._context = context
        registry = context.router.registry
        find_only = registry.find_only_model
        self._models = ModelFacts(context.system_first, registry.is_always_thinking, find_only)
        self._recorder = recorder
        self._methods = _INTERNAL_METHODS if internal else _METHODS
        self._internal = internal
        self._public_paths = frozenset(_INTERNAL_METHODS) if internal else _PUBLIC_PATHS
        self._pages = Pages(context, internal=internal)

    def check(self, request: HttpRequest) -> GatewayError | None:
        """Validate the head of a request: path, method and API key; the error to respond with."""
        error = self._check_path(request)
        if error is None and self._authenticate(request) is None:
            return WRONG_KEY if _find_credentials(request) else UNAUTHORIZED
        return error

    def _check_path(self, request: HttpRequest) -> GatewayError | None:
        method = self._methods.get(request.path) or self._resolve_path(request)
        if not method:
            return _build_not_found(request.path)
        if request.method != method and not (request.method == b"HEAD" and method == b"GET"):
            return _build_method_not_allowed(request.path, method)
        if request.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            return _ENCODED_BODY
        return None

    def _authenticate(self, request: HttpRequest) -> Tenant | None:
        """The tenant of the request; None: not authenticated."""
        if request.path in self._public_paths:
            return DEFAULT_TENANT
        return self._context.api_keys.find_tenant(_find_credentials(request))

    def handle(self, client: ClientConnection, request: HttpRequest) -> None:
        """Respond to a request: at once, or when the engine to which it goes has responded."""
        context = self._context
        request_id = request.headers.get(b"x-request-id", b"")
        if not request_id or not headers.is_valid_request_id(request_id):
            request_id = context.make_request_id()
        error, tenant = self._check_path(request), self._authenticate(request)
        if tenant is None or error is not None:
            if error is None and _find_credentials(request):
                client.reject(WRONG_KEY, request)
            else:
                self._reject(client, request, request_id, error or UNAUTHORIZED)
        else:
            try:
                if request.method == b"POST":
                    if not client.has_settled:
                        client.settle_debt()
                    self._start_request(client, request, request_id, tenant)
                else:
                    self._send_page(client, request, request_id)
            except GatewayError as refusal:
                # No other name may refer to it: its traceback refers to this frame, and the body
                # would stay in memory until the garbage collector finds that cycle.
                self._reject(client, request, request_id, refusal)

    def _reject(
        self, client: ClientConnection, request: HttpRequest, request_id: bytes, error: GatewayError
    ) -> None:
        if error is TOO_MANY_WRONG_KEYS:
            client.reject(error, request)
            return
        self._context.metrics.requests["", "refused"] += 1
        body = encode_error(error, request.path)
        refused = BuiltPage(error.status, build_error_headers(error), [body])
        self._send_response(client, request, request_id, refused)

    def record_response(self, request_id: bytes, status: int, request: HttpRequest | None) -> None:
        """Record a response for the access log, but no unknown path, which may contain anything."""
        if self._recorder is not None:
            method, path = (request.method, request.path) if request is not None else (b"", b"")
            path = path if path in self._methods else b""
            self._recorder.record_local_response(self._context, request_id, status, method, path)

    def _resolve_path(self, request: HttpRequest) -> bytes:
        """The method of a path that is not in the table; empty: no such path."""
        if len(request.path) > MAX_PATH_BYTES:
            return b""
        request.path = _find_path(_parse_target_path(request.path), self._methods)
        if self._methods is _METHODS and request.path.startswith(routes.MODEL_PREFIX):
            return b"GET"
        return self._methods.get(request.path, b"")

    def _send_response(
        self, client: ClientConnection, request: HttpRequest, request_id: bytes, page: BuiltPage
    ) -> None:
        """Send a response; to HEAD without a body, which would be read as the next response."""
        if request.path not in _UNLOGGED:
            self.record_response(request_id, page.status, request)
        with_body = request.method != b"HEAD"
        client.respond(page.status, page.fields, page.body, request_id, with_body=with_body)

    def _start_request(
        self, client: ClientConnection, request: HttpRequest, request_id: bytes, tenant: Tenant
    ) -> None:
        """Read a request at once or, if it is large or takes long, in time slices; then proxy it
        to an engine. Raises GatewayError."""
        size, context = len(request.body), self._context
        queue = context.large_bodies
        steps = self._proxy_to_engine(client, request, request_id, tenant)
        if size <= LARGE_BODY_BYTES:
            if request.path in TRANSLATORS:
                queue = context.translations
                if size <= SHORT_TRANSLATED_BYTES:
                    run_at_once(steps)
                    return
            elif next(steps, _HAS_ENDED):
                return
        task = queue.start(self._proxy_in_slices(client, request, request_id, steps))
        if task is not None:
            client.set_active_request(task)

    def _proxy_in_slices(
        self, client: ClientConnection, request: HttpRequest, request_id: bytes, steps: Steps[None]
    ) -> Steps[None]:
        try:
            yield from steps
        except GatewayError as refusal:
            self._reject(client, request, request_id, refusal)
        except Exception as fault:  # noqa: BLE001 - as `contain`
            client.active_request = None
            end_after(fault, partial(client.fail, request))

    def _proxy_to_engine(
        self, client: ClientConnection, request: HttpRequest, request_id: bytes, tenant: Tenant
    ) -> Steps[None]:
        """Read a request and proxy it to an engine. Raises GatewayError."""
        context, path = self._context, request.path
        stream: ClientStream = client
        translate = TRANSLATORS.get(path)
        if translate is not None:
            translation = yield from translate(request.body, self._models)
            path, completion = translation.path, translation.completion
            count_prompt = partial(_count_prompt, client)
            again = partial(self._merge_system, client, request, request_id, tenant, translation)
            options = context.buffer_budget, count_prompt, again
            stream = TranslatedClient(client, translation.answer, *options)
        elif path in _OTHER_PATHS:
            completion = yield from parse_engine_request(path, request.body, self._models.find_only)
        else:
            completion = yield from parse_completion(path, request.body, self._models.find_only)
        if tenant.min_request_priority is not None:
            raise_priority(completion, tenant.min_request_priority)
        session = request.headers.get(context.session_header)
        forwarded_for = request.headers.get(headers.FORWARDED_FOR)
        sender = get_sender(tenant.name, client.address, forwarded_for)
        if self._recorder is None:
            proxied = ProxiedRequest(
                context, stream, path, request_id, completion, tenant, session, sender
            )
        else:
            proxied = self._recorder.create_request(
                context, stream, request, path, request_id, completion, tenant, session, sender
            )
        client.set_active_request(proxied)
        contain(proxied.fail, proxied.start)

    def _merge_system(
        self,
        client: ClientConnection,
        request: HttpRequest,
        request_id: bytes,
        tenant: Tenant,
        translation: Translation,
    ) -> bool:
        """An engine has refused a translated request. If a system message is not the first, many
        templates do: then send it again with one, and so from now on; returns whether it is."""
        models, name = self._context.system_first, translation.completion.model
        if not translation.system.is_late:
            return False
        if translation.system.is_merged:
            # It was not the reason.
            models.discard(name)
            return False
        models.add(name)
        try:
            self._start_request(client, request, request_id, tenant)
        except GatewayError as refusal:
            self._reject(client, request, request_id, refusal)
        return True

    def _may_list_models(self, client: ClientConnection, request: HttpRequest) -> bool:
        """Whether the response on a public path may contain names of models. A wrong key counts as
        on all paths, but is ignored before it is one too many. Raises GatewayError."""
        credentials = _find_credentials(request)
        if self._internal or self._context.api_keys.accepts(credentials):
            return True
        if credentials and not client.count_wrong_key():
            raise TOO_MANY_WRONG_KEYS
        return False

    def _send_page(self, client: ClientConnection, request: HttpRequest, request_id: bytes) -> None:
        """Send one of the gateway's own pages, now or once it is built. Raises GatewayError."""
        path = request.path
        has_tenants = len(self._context.api_keys.tenants) > 1
        if path == routes.METRICS_PATH and has_tenants and not self._internal:
            raise _INTERNAL_ONLY
        respond = partial(self._send_response, client, request, request_id)
        may_list = self._may_list_models(client, request)
        shared = self._pages.find_shared(path, names_models=may_list)
        if shared is not None:
            waiting = PageRequest(respond, client.drop)
            client.set_active_request(waiting)
            shared.request(waiting)
        elif path.startswith(routes.MODEL_PREFIX):
            name = unquote(path.removeprefix(routes.MODEL_PREFIX).decode("ascii", "replace"))
            if name not in self._context.router.registry.models:
                raise convert_router_error(UnknownModel(name))
            respond(self._pages.build_model(name))
        else:
            respond(self._pages.build_small(path, names_models=may_list))


def _count_prompt(client: ClientConnection) -> int:
    """Tokens of the prompt of a client's current request; a reference to the request itself would
    be a cycle."""
    request = client.active_request
    return request.count_prompt() if isinstance(request, ProxiedRequest) else 0


def _find_credentials(request: HttpRequest) -> bytes | None:
    credentials = request.headers.get(b"authorization")
    if credentials is None and (key := request.headers.get(b"x-api-key")) is not None:
        # As Anthropic's clients send it.
        return b"Bearer " + key
    return credentials


def _parse_target_path(target: bytes) -> bytes:
    """The path of a request target in absolute form, as clients send it to proxies."""
    scheme, mark, rest = target.partition(b"://")
    if not mark or scheme.lower() not in (b"http", b"https"):
        return target
    return b"/" + rest.partition(b"/")[2]


def _find_path(path: bytes, known: Container[bytes]) -> bytes:
    """The known path that a client means whose base URL ends with a slash, has one `/v1` too many
    or none; otherwise the path as it is."""
    parts = [part for part in path.split(b"/") if part]
    while parts[:2] == [b"v1", b"v1"]:
        del parts[0]
    meant = b"/" + b"/".join(parts)
    for name in (meant, b"/v1" + meant):
        if name in known or name.startswith(routes.MODEL_PREFIX):
            return name
    return path


def _build_not_found(path: bytes) -> GatewayError:
    message = f"no such path: {_format_path(path)}; GET / lists the paths"
    return GatewayError(HTTPStatus.NOT_FOUND, message, code="unknown_url")


def _build_method_not_allowed(path: bytes, method: bytes) -> GatewayError:
    allowed = method.decode() if method != b"GET" else "GET, HEAD"
    message = f"{_format_path(path)} accepts {allowed} only"
    lines = f"allow: {allowed}\r\n".encode()
    return GatewayError(HTTPStatus.METHOD_NOT_ALLOWED, message, header_lines=lines)


def _format_path(path: bytes) -> str:
    text = path[:_QUOTED_BYTES].decode("ascii", "replace")
    return text if len(path) <= _QUOTED_BYTES else f"{text}..."
