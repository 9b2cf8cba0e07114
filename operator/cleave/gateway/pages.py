"""Everything the gateway answers, by path; all but completions it answers itself.

Used by the client connections. /health and /metrics stay open when keys are required: probes and
scrapers carry none, and nothing there is about a request.
"""

from http import HTTPStatus

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from cleave.gateway import head
from cleave.gateway.client import ClientConnection
from cleave.gateway.completion import read_completion
from cleave.gateway.context import Context
from cleave.gateway.errors import ApiError
from cleave.gateway.exchange import Exchange
from cleave.gateway.metrics import Collector
from cleave.gateway.request import Request
from cleave.router.instance import Instance
from cleave.rpc.v1 import agent_pb2

_METHODS = {
    b"/v1/chat/completions": b"POST",
    b"/v1/completions": b"POST",
    b"/v1/models": b"GET",
    b"/health": b"GET",
    b"/metrics": b"GET",
}
_OPEN = frozenset((b"/health", b"/metrics"))

_UNAUTHORIZED = ApiError(
    HTTPStatus.UNAUTHORIZED,
    "no valid API key: send it as `Authorization: Bearer KEY`",
    "invalid_request_error",
    code="invalid_api_key",
)


class Pages:
    """Gives each request to whoever answers it."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._registry = CollectorRegistry()
        self._registry.register(Collector(context.metrics))
        ProcessCollector(registry=self._registry)

    def check(self, request: Request) -> ApiError | None:
        """What is wrong with a request as far as its head tells."""
        method = _METHODS.get(request.path)
        if method is None:
            path = request.path.decode("ascii", "replace")
            return ApiError(HTTPStatus.NOT_FOUND, f"no such path: {path}", "invalid_request_error")
        if request.method != method:
            allowed = f"{request.path.decode()} answers to {method.decode()} only"
            return ApiError(HTTPStatus.METHOD_NOT_ALLOWED, allowed, "invalid_request_error")
        if request.path in _OPEN:
            return None
        accepted = self._context.keys.accept(request.headers.get(b"authorization"))
        return None if accepted else _UNAUTHORIZED

    def handle(self, client: ClientConnection, request: Request) -> None:
        """Answer a request, now or, for a completion, when the engines have."""
        context = self._context
        request_id = request.headers.get(b"x-request-id", b"")
        if not head.is_sane_id(request_id):
            request_id = context.make_id()
        error = self.check(request)
        if error is None and request.method == b"POST":
            try:
                completion = read_completion(request.body)
            except ApiError as refusal:
                error = refusal
            else:
                exchange = Exchange(context, client, request.path, request_id, completion)
                client.run(exchange)
                exchange.start()
                return
        if error is not None:
            context.metrics.requests["", "refused"] += 1
            client.respond(error.status, head.JSON, error.to_json(), request_id)
            return
        status, fields, body = self._answer(request.path)
        client.respond(status, fields, body, request_id)

    def _answer(self, path: bytes) -> tuple[int, bytes, bytes]:
        if path == b"/metrics":
            content = b"content-type: %b\r\n" % CONTENT_TYPE_PLAIN_0_0_4.encode()
            return HTTPStatus.OK, content, generate_latest(self._registry)
        if path == b"/health":
            status, page = self._describe_health()
        else:
            status, page = HTTPStatus.OK, self._list_models()
        return status, head.JSON, msgspec.json.encode(page)

    def _list_models(self) -> dict[str, object]:
        models = self._context.router.directory.models
        return {
            "object": "list",
            "data": [
                {
                    "id": name,
                    "object": "model",
                    "created": 0,
                    "owned_by": "cleave",
                    "max_model_len": min(i.registration.max_model_len for i in model.instances),
                }
                for name, model in sorted(models.items())
            ],
        }

    def _describe_health(self) -> tuple[int, dict[str, object]]:
        """200 when any model can be served; and always why others cannot."""
        router = self._context.router
        models = router.directory.models
        obstacles = {name: router.find_obstacle(name) for name in sorted(models)}
        reasons = [obstacle for obstacle in obstacles.values() if obstacle]
        if not models:
            reasons.append("no instance has registered yet")
        ready = any(not obstacle for obstacle in obstacles.values())
        status = "ok" if ready else "unavailable"
        if self._context.draining:
            ready, status = False, "draining"
        return HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE, {
            "status": status,
            "reasons": reasons,
            "requests_in_flight": self._context.metrics.in_flight,
            "models": {
                name: {
                    "ready": not obstacles[name],
                    "instances": [_describe(instance) for instance in model.instances],
                }
                for name, model in sorted(models.items())
            },
        }


def _describe(instance: Instance) -> dict[str, object]:
    stated = instance.registration
    return {
        "name": instance.name,
        "role": agent_pb2.Role.Name(stated.role).removeprefix("ROLE_").lower(),
        "state": agent_pb2.State.Name(stated.state).removeprefix("STATE_").lower(),
        "selectable": instance.selectable,
        "contact": instance.contact.value,
        "kv_path_verified": stated.kv_path.verified,
        "requests_in_flight": instance.ledger.requests,
        "reason": stated.reason,
    }
