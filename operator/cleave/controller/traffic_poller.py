"""Polls the gateways of all deployments while this operator leads.

Used by the controller, which passes the callback that enqueues a deployment. Two loops: one scrapes
traffic counters every few seconds; one polls every second for requests that wait for deployments
scaled to zero.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection

import msgspec

from cleave.api.deployment import LLMDeployment
from cleave.api.pool import InstancePool
from cleave.controller.cluster.cache import DEPLOYMENTS, ObjectCache, ResourceKey
from cleave.controller.cluster.gateway_client import build_base_url
from cleave.controller.cluster.prometheus_source import PrometheusSource
from cleave.controller.cluster.traffic_scraper import TrafficScraper
from cleave.controller.deployment import scaling
from cleave.controller.replan import reconcile
from cleave.controller.views import DriftState, TrafficDemand
from cleave.manifests.labels import Manifest
from cleave.rpc import http_client

_WAKE_UP_PERIOD_S = 1.0
_TIMEOUT_S = 2.0
_PATH = "/health"
_PAGE_LIMIT = 1 << 20

Fetch = Callable[[str], Awaitable[bytes]]
"""Returns the page at a URL. Raises http.HttpError."""


class _HealthResponse(msgspec.Struct, frozen=True):
    requests_in_flight: int = 0


async def fetch(url: str) -> bytes:
    """Return the page at `url`. Raises http.HttpError."""
    return await http_client.get(url, seconds=_TIMEOUT_S, limit=_PAGE_LIMIT)


class TrafficPoller:
    """Observed traffic of each deployment; `enqueue` is called for one when it has changed."""

    def __init__(
        self,
        cache: ObjectCache,
        enqueue: Callable[[ResourceKey], None],
        now: Callable[[], float],
        prometheus: PrometheusSource | None = None,
    ) -> None:
        """`now` is Unix time; `prometheus`: has the gateways' counters, None: only they have."""
        self._cache, self._enqueue = cache, enqueue
        self.scraper: TrafficScraper[ResourceKey] = TrafficScraper(now, prometheus=prometheus)
        self._activator = Activator()
        self._drift: dict[ResourceKey, DriftState] = {}

    async def run_traffic_polls(self, elected: asyncio.Event, period_s: float) -> None:
        """Scrape the counters of all gateways periodically; never returns."""
        loop = asyncio.get_running_loop()
        while True:
            await elected.wait()
            began = loop.time()
            await asyncio.gather(*(self.poll_traffic(key) for key in self._list_deployments()))
            await asyncio.sleep(max(period_s / 4, period_s - (loop.time() - began)))

    async def run_wake_up_polls(self, elected: asyncio.Event) -> None:
        """Poll deployments without instances, so that a waiting request starts them at once."""
        while True:
            await elected.wait()
            keys = self.list_wake_up_keys()
            await asyncio.gather(*(self.poll_scaled_to_zero(key) for key in keys))
            await asyncio.sleep(_WAKE_UP_PERIOD_S)

    def list_wake_up_keys(self) -> list[ResourceKey]:
        """Return the deployments that may be scaled to zero, or had waiting requests when they
        last might. A thousand others would cost 3 % of a core."""
        return [key for key in self._list_deployments() if self._may_wait(key)]

    async def poll_traffic(self, key: ResourceKey) -> None:
        """Scrape the gateways of one deployment, if scaling or replanning needs it."""
        resource, gateways = self._get_deployment(key), self._cache.list_gateways(key)
        if resource is None or not gateways:
            return
        is_scaled = scaling.is_enabled(resource)
        if not (is_scaled or reconcile.is_enabled(resource)):
            # What was seen last would be reported as present.
            self.scraper.forget(key)
            return
        has_window = await self.scraper.scrape(key, gateways)
        is_complete = has_window and (self.scraper.is_minute_complete(key) or self._is_urgent(key))
        # Scheduled peaks begin whether or not the gateways respond.
        if is_scaled or is_complete:
            self._enqueue(key)

    async def poll_scaled_to_zero(self, key: ResourceKey) -> None:
        """Poll the gateways of a deployment that is scaled to zero for waiting requests."""
        resource = self._get_deployment(key)
        resources = (each.resource for each in self._cache.list_pools(key))
        pools = [pool for pool in resources if isinstance(pool, InstancePool)]
        if resource is None or not scaling.is_scaled_to_zero(resource, pools):
            self._activator.forget(key)
        elif await self._activator.poll(key, self._cache.list_gateways(key)):
            self.scraper.record_request(key)
            self._enqueue(key)

    def measure_demand(self, key: ResourceKey, deployment: LLMDeployment) -> TrafficDemand | None:
        """Return the traffic to scale its instances by; None: not known, or scaling is off."""
        if not scaling.is_enabled(deployment):
            return None
        counting = self.scraper
        return scaling.measure_demand(
            counting.get_windows(key) if counting.get_recent(key) else (),
            deployment.spec.scaling.calm_s,
            in_flight=self._activator.get_waiting(key) or counting.get_in_flight(key),
            idle_s=counting.get_idle_s(key),
        )

    def update_drift(
        self, key: ResourceKey, deployment: LLMDeployment, status: Manifest
    ) -> DriftState:
        """Return the drift of its traffic from the planned one; each window is compared once."""
        previous, windows = self._drift.get(key, DriftState()), self.scraper.get_windows(key)
        state = reconcile.update_drift(previous, deployment, status, windows)
        self._drift[key] = state
        return state

    def forget(self, key: ResourceKey) -> None:
        """Drop the observed traffic of a deleted deployment."""
        self._drift.pop(key, None)
        self.scraper.forget(key)
        self._activator.forget(key)

    def _is_urgent(self, key: ResourceKey) -> bool:
        cached = self._cache.get(key)
        if cached is None:
            return False
        state = self.update_drift(key, cached.resolved.written, cached.status)
        return reconcile.is_urgent(state, cached.resolved, cached.status)

    def _may_wait(self, key: ResourceKey) -> bool:
        resource = self._get_deployment(key)
        can_scale = resource is not None and resource.spec.scaling.idle_s is not None
        return can_scale or self._activator.get_waiting(key) > 0

    def _list_deployments(self) -> list[ResourceKey]:
        return [key for key in self._cache.list_resources() if key.kind == DEPLOYMENTS]

    def _get_deployment(self, key: ResourceKey) -> LLMDeployment | None:
        cached = self._cache.get(key)
        resource = cached.resource if cached else None
        return resource if isinstance(resource, LLMDeployment) else None


class Activator:
    """Waiting requests of each deployment that is scaled to zero.

    A gateway's `/health` is small while it knows no instance, so many deployments may be scaled to
    zero. A gateway that does not respond counts as 0 and is polled again a second later.
    """

    def __init__(self, fetch: Fetch = fetch) -> None:
        self._fetch = fetch
        self._waiting: dict[ResourceKey, int] = {}

    def get_waiting(self, key: ResourceKey) -> int:
        """Return the requests that waited at the last poll."""
        return self._waiting.get(key, 0)

    def forget(self, key: ResourceKey) -> None:
        """Drop a deployment that runs again or was deleted."""
        self._waiting.pop(key, None)

    async def poll(self, key: ResourceKey, gateways: Collection[str]) -> int:
        """Poll the gateways at these addresses for waiting requests. Never raises."""
        counts = await asyncio.gather(*(self._fetch_waiting(address) for address in gateways))
        self._waiting[key] = sum(counts)
        return self._waiting[key]

    async def _fetch_waiting(self, address: str) -> int:
        try:
            body = await self._fetch(build_base_url(address) + _PATH)
            return msgspec.json.decode(body, type=_HealthResponse).requests_in_flight
        except (http_client.HttpError, msgspec.DecodeError):
            return 0
