"""The gateway's own pages: health, models, metrics, the fleet and the description of its API.

Used by the handlers. All but the smallest grow with the fleet, so they are built in time slices.
What is hard: if the gateway has API keys, a client without one must not learn names of models,
instances or tenants, but probes send no key. So /health and /openapi.json need none and then
contain less.
"""

import os
import time
from http import HTTPStatus

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from cleave.gateway.app import routes
from cleave.gateway.app.fleet_status import describe_fleet
from cleave.gateway.app.openapi import MODEL_NAME, build_openapi, describe_server
from cleave.gateway.app.shared_page import BuiltPage, SharedPage
from cleave.gateway.context import GatewayContext
from cleave.gateway.http import headers
from cleave.gateway.metrics.families import Family, write_page
from cleave.gateway.metrics.gateway_families import list_families
from cleave.gateway.metrics.instance_metrics import CacheHitPage, collect_instances
from cleave.gateway.metrics.multiprocess import sum_counters
from cleave.gateway.metrics.process_metrics import measure_processes
from cleave.gateway.shared_state import SharedGatewayState
from cleave.router.instance import RoutedInstance
from cleave.rpc.enum_names import get_enum_name
from cleave.rpc.v1 import agent_pb2
from cleave.time_slices import Steps

MAX_TICK_AGE_S = 5.0
"""The sweeper runs five times a second; after so long without a run it counts as hung."""

_METRICS_CONTENT = b"content-type: %b\r\n" % CONTENT_TYPE_PLAIN_0_0_4.encode()
_encode = msgspec.json.Encoder().encode
_PLACE = b'"ModelName":'
_BEFORE, _, _AFTER = _encode(build_openapi()).partition(_PLACE + _encode(MODEL_NAME))
_OPENAPI = _BEFORE + _PLACE, _AFTER
"""What is before and behind the description of a model's name; encoding all takes 5 ms."""


class Pages:
    """The pages of one port."""

    def __init__(self, context: GatewayContext, *, internal: bool) -> None:
        self._context = context
        self._cache_hits = CacheHitPage(context.router.registry)
        queue = context.own_work if internal else context.public_pages
        self._status = SharedPage(context.own_work, self._build_status)
        self._pages = {
            routes.HEALTH_PATH: SharedPage(queue, self._build_health),
            routes.MODELS_PATH: SharedPage(queue, self._build_models),
            routes.FLEET_PATH: SharedPage(queue, self._build_fleet),
            routes.METRICS_PATH: SharedPage(queue, self._build_metrics),
        }

    def find_shared(self, path: bytes, *, names_models: bool) -> SharedPage | None:
        """The page for this path; None: it is built for each request."""
        if path == routes.HEALTH_PATH and not names_models:
            return self._status
        return self._pages.get(path)

    def build_small(self, path: bytes, *, names_models: bool) -> BuiltPage:
        """A page that is not shared."""
        if path == routes.LIVEZ_PATH:
            return self._build_liveness()
        if path == routes.OPENAPI_PATH:
            return self._build_openapi(names_models)
        return _build_json(HTTPStatus.OK, describe_server())

    def build_model(self, name: str) -> BuiltPage:
        """The description of a model that the gateway knows."""
        return _build_json(HTTPStatus.OK, self._describe_model(name))

    def _build_liveness(self) -> BuiltPage:
        late_s = self._context.clock() - self._context.last_tick_at
        if late_s <= MAX_TICK_AGE_S:
            return BuiltPage(HTTPStatus.OK, headers.TEXT_CONTENT, [b"ok\n"])
        message = f"deadlines have not been checked for {late_s:.1f} s\n"
        return BuiltPage(HTTPStatus.SERVICE_UNAVAILABLE, headers.TEXT_CONTENT, [message.encode()])

    def _build_openapi(self, names_models: bool) -> BuiltPage:
        """With the models' names as examples of names, or without."""
        names = sorted(self._context.router.registry.models) if names_models else []
        described = _encode(MODEL_NAME | ({"examples": names} if names else {}))
        before, after = _OPENAPI
        return BuiltPage(HTTPStatus.OK, headers.JSON_CONTENT, [before, described, after])

    def _build_metrics(self) -> Steps[BuiltPage]:
        context, pids = self._context, [os.getpid()]
        total, shared = context.metrics, context.shared_state
        if shared is not None:
            yield from context.save_counters()
            total = yield from sum_counters(total, shared)
            pids = [os.getppid(), *shared.list_pids()]
        instances = yield from collect_instances(context.router.registry)
        hits: list[Family] = []
        if context.router.uses_prompt_text:
            hits = yield from self._cache_hits.collect()
        body: list[bytes] = []
        for families in (list_families(total), measure_processes(pids), instances, hits):
            body += yield from write_page(families)
        return BuiltPage(HTTPStatus.OK, _METRICS_CONTENT, body)

    def _build_fleet(self) -> Steps[BuiltPage]:
        body = yield from describe_fleet(self._context)
        return BuiltPage(HTTPStatus.OK, headers.JSON_CONTENT, body)

    def _build_models(self) -> Steps[BuiltPage]:
        described = [b'{"object":"list","data":[']
        registry = self._context.router.registry
        for name in sorted(registry.models):
            yield
            if name in registry.models:
                comma = b"," if len(described) > 1 else b""
                described.append(comma + _encode(self._describe_model(name)))
        body = [b"".join(described), b"]}"]
        return BuiltPage(HTTPStatus.OK, headers.JSON_CONTENT, body)

    def _describe_model(self, name: str) -> dict[str, object]:
        registry = self._context.router.registry
        served = registry.models[name]
        return {
            "id": name,
            "object": "model",
            "created": self._compute_created(name),
            "owned_by": "cleave",
            "parent": served.base if served.adapter is not None else None,
            "max_model_len": registry.find_max_model_len(name),
        }

    def _compute_created(self, name: str) -> int:
        """Unix time when this gateway first found an instance that serves the model."""
        context = self._context
        first_seen_s = context.router.registry.known_models.get(name, context.clock())
        return round(time.time() - (context.clock() - first_seen_s))

    def _build_status(self) -> Steps[BuiltPage]:
        """The part of the health that a client without a key may know."""
        hung = self._list_hung()
        can_serve = yield from self._context.can_serve()
        status, health = self._assess_health(can_serve, hung)
        return _build_json(status, {"status": health})

    def _build_health(self) -> Steps[BuiltPage]:
        router, reasons = self._context.router, []
        described: list[bytes] = []
        can_serve = False
        for name, model in sorted(router.registry.models.items()):
            # Adapters can be served wherever their base model can.
            if model.base:
                continue
            obstacle = router.explain_unavailable(name)
            can_serve = can_serve or not obstacle
            reasons += [obstacle] if obstacle else []
            instances = []
            for instance in model.instances:
                instances.append(_describe_instance(instance))
                yield
            model_health = {"ready": not obstacle, "instances": instances}
            described.append(_encode(name) + b":" + _encode(model_health))
        if not described:
            refusals = router.registry.explain_refusals()
            reasons.append(f"no instance has registered yet{refusals}")
        hung = self._list_hung()
        status, health = self._assess_health(can_serve, hung)
        in_flight = self._context.count_in_flight()
        summary = {"status": health, "reasons": reasons + hung, "requests_in_flight": in_flight}
        body = [_encode(summary)[:-1] + b',"models":{', b",".join(described), b"}}"]
        return BuiltPage(status, headers.JSON_CONTENT, body)

    def _list_hung(self) -> list[str]:
        shared = self._context.shared_state
        return _describe_hung_processes(shared, self._context.clock()) if shared else []

    def _assess_health(self, can_serve: bool, hung: list[str]) -> tuple[int, str]:
        """200 when any model can be served or waited for. If requests may wait for an instance,
        they must be sent here even without one."""
        ready = (can_serve or self._context.config.timeouts.wake_s > 0) and not hung
        health = "ok" if ready else "unavailable"
        if self._context.draining:
            ready, health = False, "draining"
        return HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE, health


def _build_json(status: int, value: object) -> BuiltPage:
    return BuiltPage(status, headers.JSON_CONTENT, [_encode(value)])


def _describe_hung_processes(shared_state: SharedGatewayState, now: float) -> list[str]:
    """Hung processes; the kernel still gives them a share of the connections."""
    return [
        f"process {number + 1} of {shared_state.num_processes} has had no heartbeat for {age:.0f} s"
        for number, age in shared_state.list_hung(now)
    ]


def _describe_instance(instance: RoutedInstance) -> dict[str, object]:
    registration = instance.registration
    return {
        "name": instance.name,
        "role": get_enum_name(agent_pb2.Role, registration.role),
        "state": get_enum_name(agent_pb2.State, registration.state),
        "selectable": instance.selectable,
        "contact": instance.connectivity.value,
        "kv_path_verified": registration.kv_path.verified,
        "requests_in_flight": instance.in_flight.count_requests(),
        "reason": registration.reason,
    }
