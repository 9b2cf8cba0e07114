"""The endpoints of a Service, listed once or watched, and its labels. Used by agent_discovery.py.

All endpoints count, ready or not: agents report their own state, and draining ones are watched to
their end. What is hard: the API server may be unavailable for minutes while requests go on, so the
last known addresses stay valid until a new list arrives; and hundreds of watchers must not
reconnect at the same instant, so every wait is jittered.
"""

import asyncio
import logging
import random
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from cleave.rpc import kube_api
from cleave.rpc.credentials import AgentEndpoint
from cleave.rpc.http_client import HttpError
from cleave.rpc.kube_api import AccessError, ApiServerAccess, ApiServerError, find_access
from cleave.rpc.plan_thresholds import PlanThresholds, parse_thresholds

log = logging.getLogger(__name__)

SERVICE_LABEL = "kubernetes.io/service-name"
LIST_TIMEOUT_S = 10.0
WATCH_TIMEOUT_S = 240
"""Timeout of a watch on the server; the list that follows it is the resync."""
WATCH_SLACK_S = 20.0
"""Additional time after which a watch counts as dead."""
MIN_DELAY_S = 0.2
MAX_DELAY_S = 5.0

_GONE = 410

EndpointsByAddress = dict[str, AgentEndpoint]
"""Agents by host:port."""


@dataclass(frozen=True, slots=True)
class _Slice:
    """One EndpointSlice."""

    endpoints: EndpointsByAddress
    thresholds: PlanThresholds
    """From its labels, which are those of the Service."""
    version: int
    """Resource version."""


_Slices = dict[str, _Slice]


@dataclass(frozen=True, slots=True)
class Service:
    """A Service, and the port of its endpoints."""

    namespace: str
    name: str
    port: int


async def list_endpoints(service: Service) -> EndpointsByAddress:
    """All endpoints now. Raises AccessError, ApiServerError, HttpError."""
    slices, _ = await _list_slices(find_access(), service)
    return _merge_slices(slices)


class EndpointSliceWatcher:
    """Watches the endpoints of a Service and keeps their addresses up to date while it runs."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._slices: _Slices = {}
        self.endpoints: EndpointsByAddress = {}
        """As of the last list or event."""
        self.thresholds = PlanThresholds()
        """Likewise, from the slice that was written last: the others follow."""

    async def run(self) -> None:
        """List and watch until cancelled; errors are logged and retried with back-off."""
        delay = MIN_DELAY_S
        while True:
            try:
                access = find_access()
                await self._watch(access, await self._relist(access))
                delay = MIN_DELAY_S
            except (AccessError, ApiServerError, HttpError) as error:
                log.warning("endpoints of %s: %s", self._service.name, error)
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(2 * delay, MAX_DELAY_S)

    async def _relist(self, access: ApiServerAccess) -> str:
        self._slices, version = await _list_slices(access, self._service)
        self._update()
        return version

    async def _watch(self, access: ApiServerAccess, version: str) -> None:
        seconds = int(WATCH_TIMEOUT_S * random.uniform(0.75, 1.0))
        options = {"resourceVersion": version, "timeoutSeconds": str(seconds)}
        path = _build_path(self._service, watch="1", allowWatchBookmarks="true", **options)
        try:
            async with (
                asyncio.timeout(seconds + WATCH_SLACK_S),
                aclosing(kube_api.watch_objects(access, path)) as events,
            ):
                async for event in events:
                    self._apply_event(event)
        except TimeoutError:
            raise HttpError("the watch has gone silent") from None
        except ApiServerError as error:
            if error.status != _GONE:
                raise

    def _apply_event(self, event: dict[str, Any]) -> None:
        try:
            kind, item = event["type"], event["object"]
            if kind == "ERROR":
                raise ApiServerError(item["code"], item.get("message", ""))
            if kind == "DELETED":
                self._slices.pop(item["metadata"]["name"], None)
            elif kind in ("ADDED", "MODIFIED"):
                self._slices[item["metadata"]["name"]] = _read_slice(item, self._service.port)
        except (KeyError, TypeError, AttributeError) as error:
            raise HttpError(f"the API server sent an invalid event: {error!r}") from None
        self._update()

    def _update(self) -> None:
        self.endpoints = _merge_slices(self._slices)
        newest = max(self._slices.values(), key=lambda each: each.version, default=None)
        self.thresholds = newest.thresholds if newest else PlanThresholds()


def _read_slice(item: dict[str, Any], port: int) -> _Slice:
    meta = item["metadata"]
    version = str(meta.get("resourceVersion", ""))
    thresholds = parse_thresholds(meta.get("labels") or {})
    return _Slice(parse_slice(item, port), thresholds, int(version) if version.isdigit() else 0)


def parse_slice(item: dict[str, Any], port: int) -> EndpointsByAddress:
    """The agents that one EndpointSlice lists.

    Pods with several agents have further ports, named agent-1, agent-2, ... The API allows ports
    without a name or number (null, or absent), which name no agent.
    """
    if item.get("addressType") not in ("IPv4", "IPv6"):
        return {}
    named = (
        each.get("port")
        for each in item.get("ports") or ()
        if (each.get("name") or "").startswith("agent-")
    )
    ports = {port, *filter(None, named)}
    endpoints = item.get("endpoints") or ()
    found = (
        AgentEndpoint(_join(each["addresses"][0], number), target["name"], target["uid"])
        for each in endpoints
        # What is not a pod has no identity that its registration could be compared with.
        if (target := each.get("targetRef") or {}).get("kind") == "Pod"
        for number in ports
    )
    return {each.address: each for each in found}


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _list_slices(access: ApiServerAccess, service: Service) -> tuple[_Slices, str]:
    """Addresses by slice, and the resource version from which to watch."""
    # Version 0: from the API server's cache; the watch corrects a slightly old list.
    path = _build_path(service, resourceVersion="0")
    slice_list = await kube_api.get_object(access, path, LIST_TIMEOUT_S)
    try:
        items = slice_list.get("items") or ()
        slices = {each["metadata"]["name"]: _read_slice(each, service.port) for each in items}
        return slices, slice_list["metadata"]["resourceVersion"]
    except (KeyError, TypeError, AttributeError) as error:
        raise HttpError(f"the API server sent an invalid EndpointSliceList: {error!r}") from None


def _build_path(service: Service, **parameters: str) -> str:
    query = urlencode({"labelSelector": f"{SERVICE_LABEL}={service.name}", **parameters})
    return f"/apis/discovery.k8s.io/v1/namespaces/{service.namespace}/endpointslices?{query}"


def _merge_slices(slices: _Slices) -> EndpointsByAddress:
    merged: EndpointsByAddress = {}
    for each in slices.values():
        merged |= each.endpoints
    return merged
