"""Handlers of all paths of the gateway: its own GET paths, and the POST paths that go to engines.

Used by the client connections. What is hard: where there are API keys, a client without one must
not learn names of models, instances or tenants, but probes send no key. So /health and
/openapi.json need none and then say less; scrapers send a key or use the internal port, which no
Service exposes. /fleet describes every instance and its load, which only the operator needs: it
exists on the internal port only, and so does /metrics when there are several tenants, because it
shows the traffic of each.
"""

from http import HTTPStatus
from urllib.parse import unquote

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from cleave.gateway.admission.tenants import EVERYBODY, Tenant
from cleave.gateway.app.client_connection import ClientConnection
from cleave.gateway.app.fleet_status import describe_fleet
from cleave.gateway.app.openapi import describe
from cleave.gateway.app.routes import (
    COMPLETIONS,
    FLEET,
    HEALTH,
    INTERNAL,
    LIVEZ,
    METRICS,
    MODEL,
    OPENAPI,
    OTHERS,
    OWN,
)
from cleave.gateway.context import Context
from cleave.gateway.http import headers
from cleave.gateway.http.completion_request import read_completion, read_other
from cleave.gateway.http.errors import ApiError, build_error_fields, from_router
from cleave.gateway.http.request_parser import Request
from cleave.gateway.metrics.gateway_metrics import Collector
from cleave.gateway.metrics.instance_metrics import FleetCollector
from cleave.gateway.metrics.multiprocess import SummedCollector
from cleave.gateway.proxy.proxied_request import Exchange
from cleave.gateway.shared_state import Siblings
from cleave.gateway.tracing.recorder import Watch
from cleave.router.errors import UnknownModel
from cleave.router.instance import Instance
from cleave.rpc.enum_names import name_of
from cleave.rpc.v1 import agent_pb2

_OTHERS = frozenset(route.path for route in OTHERS)
_METHODS = {route.path: b"POST" for route in (*COMPLETIONS, *OTHERS)} | {
    route.path: b"GET" for route in OWN
}
_OPEN = frozenset(route.path for route in OWN if not route.needs_key)
_INTERNAL_METHODS = {route.path: b"GET" for route in INTERNAL}
_UNLOGGED = frozenset((FLEET, HEALTH, LIVEZ, METRICS, OPENAPI))
"""Paths that probes and scrapers request."""

ALIVE_S = 5.0
"""The sweeper runs five times a second; after so long without a run it counts as hung."""

_UNAUTHORIZED = ApiError(
    HTTPStatus.UNAUTHORIZED,
    "no valid API key: send it as `Authorization: Bearer KEY`",
    "invalid_request_error",
    code="invalid_api_key",
    fields=b"www-authenticate: Bearer\r\n",
)
_OF_ALL_TENANTS = ApiError(
    HTTPStatus.FORBIDDEN,
    "/metrics shows all tenants, so it is available on the port of --internal-port only",
    "invalid_request_error",
    code="internal_only",
)


class Pages:
    """Handles the requests of one port."""

    def __init__(
        self, context: Context, recorder: Watch | None = None, *, internal: bool = False
    ) -> None:
        """`recorder`: records requests for logs and traces; `internal`: for the internal port."""
        self._context = context
        self._watch = recorder
        self._methods = _INTERNAL_METHODS if internal else _METHODS
        self._internal = internal
        self._open = frozenset(_INTERNAL_METHODS) if internal else _OPEN
        self._api: dict[bool, tuple[list[str], bytes]] = {}
        """The OpenAPI description, encoded, with the model names in it; by whether there are
        any."""
        self._registry = CollectorRegistry()
        if context.siblings is None:
            self._registry.register(Collector(context.metrics))
            ProcessCollector(registry=self._registry)
        else:
            self._registry.register(SummedCollector(context.metrics, context.siblings))
        self._registry.register(FleetCollector(context.router.directory))

    def check(self, request: Request) -> ApiError | None:
        """Validate the head of a request: path, method and API key; the error to respond with."""
        error = self._check_path(request)
        if error is None and self._find_tenant(request) is None:
            return _UNAUTHORIZED
        return error

    def _check_path(self, request: Request) -> ApiError | None:
        method = self._methods.get(request.path) or self._look_closer(request)
        if not method:
            return _find_nothing(request.path)
        if request.method != method and not (request.method == b"HEAD" and method == b"GET"):
            return _forbid(request.path, method)
        return None

    def _find_tenant(self, request: Request) -> Tenant | None:
        """The tenant of the request; None: not authenticated."""
        if request.path in self._open:
            return EVERYBODY
        return self._context.keys.find(request.headers.get(b"authorization"))

    def handle(self, client: ClientConnection, request: Request) -> None:
        """Respond to a request: at once, or, if it goes to an engine, when the engine has
        responded."""
        context = self._context
        request_id = request.headers.get(b"x-request-id", b"")
        if not request_id or not headers.is_sane_id(request_id):
            request_id = context.make_id()
        error, tenant = self._check_path(request), self._find_tenant(request)
        if tenant is None:
            self._refuse(client, request, request_id, error or _UNAUTHORIZED)
        elif error is not None:
            self._refuse(client, request, request_id, error)
        else:
            try:
                if request.method == b"POST":
                    self._pass_on(client, request, request_id, tenant)
                else:
                    self._tell(client, request, self._answer(request), request_id)
            except ApiError as refusal:
                # No other name may refer to it: its traceback refers to this frame, and the body
                # would stay in memory until the garbage collector finds that cycle.
                self._refuse(client, request, request_id, refusal)

    def _refuse(
        self, client: ClientConnection, request: Request, request_id: bytes, error: ApiError
    ) -> None:
        """Respond with an error."""
        self._context.metrics.requests["", "refused"] += 1
        refused = error.status, build_error_fields(error), error.to_json()
        self._tell(client, request, refused, request_id)

    def note(self, request_id: bytes, status: int, request: Request | None = None) -> None:
        """Record a response for the access log, without paths that do not exist here, as they may
        contain anything."""
        if self._watch is not None:
            is_known = request is not None and request.path in self._methods
            self._watch.note(
                self._context,
                request_id,
                status,
                request.method if request is not None else b"",
                request.path if request is not None and is_known else b"",
            )

    def _look_closer(self, request: Request) -> bytes:
        """The method of a path that is not in the table; empty: no such path."""
        request.path = _find_path(request.path)
        if self._methods is _METHODS and request.path.startswith(MODEL):
            return b"GET"
        return self._methods.get(request.path, b"")

    def _tell(
        self,
        client: ClientConnection,
        request: Request,
        response: tuple[int, bytes, bytes],
        request_id: bytes,
    ) -> None:
        """Send a response; to HEAD without its body, which the client would read as the next
        response."""
        if request.path not in _UNLOGGED:
            self.note(request_id, response[0], request)
        client.respond(*response, request_id, with_body=request.method != b"HEAD")

    def _pass_on(
        self, client: ClientConnection, request: Request, request_id: bytes, tenant: Tenant
    ) -> None:
        """Proxy a request to an engine. Raises ApiError."""
        context = self._context
        if request.path in _OTHERS:
            models = context.router.directory.models
            bases = [name for name, entry in models.items() if not entry.base]
            completion = read_other(request.body, bases[0] if len(bases) == 1 else "", request.scan)
        else:
            completion = read_completion(request.body, request.scan)
        session = request.headers.get(context.session_header)
        exchange: Exchange
        if self._watch is None:
            exchange = Exchange(
                context, client, request.path, request_id, completion, tenant, session
            )
        else:
            exchange = self._watch.open(
                context, client, request, request_id, completion, tenant, session
            )
        client.run(exchange)
        exchange.start()

    def _may_know(self, request: Request) -> bool:
        """Whether the response on a public path may contain names of models."""
        keys = self._context.keys
        return self._internal or keys.accept(request.headers.get(b"authorization"))

    def _answer(self, request: Request) -> tuple[int, bytes, bytes]:
        path = request.path
        if path == LIVEZ:
            late_s = self._context.clock() - self._context.swept_at
            if late_s <= ALIVE_S:
                return HTTPStatus.OK, headers.TEXT, b"ok\n"
            message = f"deadlines have not been checked for {late_s:.1f} s\n"
            return HTTPStatus.SERVICE_UNAVAILABLE, headers.TEXT, message.encode()
        if path == FLEET:
            page = describe_fleet(self._context)
            return HTTPStatus.OK, headers.JSON, msgspec.json.encode(page)
        if path == METRICS:
            if not self._internal and len(self._context.keys.tenants) > 1:
                raise _OF_ALL_TENANTS
            content = b"content-type: %b\r\n" % CONTENT_TYPE_PLAIN_0_0_4.encode()
            return HTTPStatus.OK, content, generate_latest(self._registry)
        if path == OPENAPI:
            directory = self._context.router.directory
            names = sorted(directory.models) if self._may_know(request) else []
            return HTTPStatus.OK, headers.JSON, self._describe_api(names)
        if path == HEALTH:
            status, health = self._describe_health()
            if not self._may_know(request):
                health = {"status": health["status"]}
            return status, headers.JSON, msgspec.json.encode(health)
        models = self._context.router.directory.models
        if path.startswith(MODEL):
            name = unquote(path.removeprefix(MODEL).decode("ascii", "replace"))
            if name not in models:
                raise from_router(UnknownModel(name))
            return HTTPStatus.OK, headers.JSON, msgspec.json.encode(self._describe_model(name))
        listed = {"object": "list", "data": [self._describe_model(n) for n in sorted(models)]}
        return HTTPStatus.OK, headers.JSON, msgspec.json.encode(listed)

    def _describe_api(self, names: list[str]) -> bytes:
        """Built once with the model names and once without, until these change."""
        cached = self._api.get(bool(names))
        if cached is None or cached[0] != names:
            cached = self._api[bool(names)] = names, msgspec.json.encode(describe(names))
        return cached[1]

    def _describe_model(self, name: str) -> dict[str, object]:
        directory = self._context.router.directory
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "cleave",
            "parent": directory.models[name].base or None,
            "max_model_len": directory.find_max_model_len(name),
        }

    def _describe_health(self) -> tuple[int, dict[str, object]]:
        """200 when any model can be served or waited for, with the reasons why others cannot."""
        router = self._context.router
        entries = router.directory.models
        # Adapters can be served wherever their base model can.
        models = {name: model for name, model in entries.items() if not model.base}
        reasons_by_model = {name: router.find_obstacle(name) for name in sorted(models)}
        reasons = [obstacle for obstacle in reasons_by_model.values() if obstacle]
        if not models:
            reasons.append("no instance has registered yet")
        # If requests may wait for an instance, they must be sent here even without one.
        may_wait = self._context.config.timeouts.wake_s > 0
        ready = may_wait or any(not obstacle for obstacle in reasons_by_model.values())
        siblings = self._context.siblings
        if siblings and (hung := _describe_missing(siblings, self._context.clock())):
            reasons += hung
            ready = False
        status = "ok" if ready else "unavailable"
        if self._context.draining:
            ready, status = False, "draining"
        return HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE, {
            "status": status,
            "reasons": reasons,
            "requests_in_flight": self._context.count_in_flight(),
            "models": {
                name: {
                    "ready": not reasons_by_model[name],
                    "instances": [_describe(instance) for instance in model.instances],
                }
                for name, model in sorted(models.items())
            },
        }


def _describe_missing(shared_state: Siblings, now: float) -> list[str]:
    """Hung processes; the kernel still gives them a share of the connections."""
    return [
        f"process {process + 1} of {shared_state.count} has had no heartbeat for {age:.0f} s"
        for process, age in shared_state.find_missing(now)
    ]


def _find_path(target: bytes) -> bytes:
    """The path of a request target in absolute form, as clients send it to proxies."""
    scheme, mark, rest = target.partition(b"://")
    if not mark or scheme.lower() not in (b"http", b"https"):
        return target
    return b"/" + rest.partition(b"/")[2]


def _find_nothing(path: bytes) -> ApiError:
    text = path.decode("ascii", "replace")
    return ApiError(HTTPStatus.NOT_FOUND, f"no such path: {text}", "invalid_request_error")


def _forbid(path: bytes, method: bytes) -> ApiError:
    allowed = method.decode() if method != b"GET" else "GET, HEAD"
    return ApiError(
        HTTPStatus.METHOD_NOT_ALLOWED,
        f"{path.decode('ascii', 'replace')} accepts {allowed} only",
        "invalid_request_error",
        fields=f"allow: {allowed}\r\n".encode(),
    )


def _describe(instance: Instance) -> dict[str, object]:
    registration = instance.registration
    return {
        "name": instance.name,
        "role": name_of(agent_pb2.Role, registration.role),
        "state": name_of(agent_pb2.State, registration.state),
        "selectable": instance.selectable,
        "contact": instance.contact.value,
        "kv_path_verified": registration.kv_path.verified,
        "requests_in_flight": instance.ledger.count_requests(),
        "reason": registration.reason,
    }
