"""Caches the gateways' reports about each deployment's instances.

Used by the controller. A refresh costs a request per gateway; so it happens when the set of ready
instances has changed, before a decision that depends on load, and otherwise every `_MAX_AGE_S`
seconds.
"""

from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from cleave.api.role import Role
from cleave.controller.cluster import instance_status
from cleave.rpc.fleet_status import FleetInstance

K = TypeVar("K", bound=Hashable)

_MAX_AGE_S = 45.0
_FIRST_INCOMPLETE_AGE_S = 1.0
"""How long the first incomplete response is used; doubles with each further one."""
_FRESH_AGE_S = 2.0

InstancesByPod = Mapping[str, FleetInstance] | None
"""Instances by pod; None: no gateway has responded yet."""
FetchInstances = Callable[[Collection[str]], Awaitable[InstancesByPod]]


@dataclass(frozen=True, slots=True)
class _CachedInstances:
    at_s: float
    ready: frozenset[str]
    instances: InstancesByPod
    incomplete_count: int
    """Consecutive incomplete responses."""

    @property
    def valid_s(self) -> float:
        """Seconds for which the response is used."""
        return (
            min(_MAX_AGE_S, _FIRST_INCOMPLETE_AGE_S * 2.0 ** (self.incomplete_count - 1))
            if self.incomplete_count
            else _MAX_AGE_S
        )


class GatewayClient(Generic[K]):
    """The last response of the gateways, by deployment."""

    def __init__(
        self, clock: Callable[[], float], fetch: FetchInstances = instance_status.fetch_instances
    ) -> None:
        self._clock, self._fetch = clock, fetch
        self._cached: dict[K, _CachedInstances] = {}

    def get_cached(self, key: K) -> InstancesByPod:
        """Return the cached response."""
        cached = self._cached.get(key)
        return cached.instances if cached else None

    async def get_or_refresh(
        self, key: K, gateways: Collection[str], ready: frozenset[str]
    ) -> InstancesByPod:
        """Return the cached response, refreshed when old or when other pods are `ready` (names)."""
        cached = self._cached.get(key)
        if cached and cached.ready == ready and self._clock() - cached.at_s < cached.valid_s:
            return cached.instances
        return await self._refresh(key, gateways, ready)

    def get_retry_delay_s(self, key: K) -> float | None:
        """Seconds until a retry of an incomplete response; None: it is complete."""
        cached = self._cached.get(key)
        return cached.valid_s if cached is not None and cached.incomplete_count else None

    async def get_fresh(self, key: K, gateways: Collection[str]) -> InstancesByPod:
        """Return a response that is at most `_FRESH_AGE_S` seconds old."""
        cached = self._cached.get(key)
        if cached and self._clock() - cached.at_s < _FRESH_AGE_S:
            return cached.instances
        return await self._refresh(key, gateways, cached.ready if cached else frozenset())

    def forget(self, key: K) -> None:
        """Drop the response: the deployment was deleted, or its instances have changed."""
        self._cached.pop(key, None)

    async def _refresh(
        self, key: K, gateways: Collection[str], ready: frozenset[str]
    ) -> InstancesByPod:
        if not gateways or not ready:
            return self.get_cached(key)
        response = await self._fetch([*map(instance_status.build_base_url, gateways)])
        instances_now = self.get_cached(key) if response is None else response
        previous = self._cached.get(key)
        incomplete_before = previous.incomplete_count if previous and previous.ready == ready else 0
        incomplete_count = (
            0
            if all(_is_complete((instances_now or {}).get(name)) for name in ready)
            else min(incomplete_before + 1, 8)
        )
        self._cached[key] = _CachedInstances(self._clock(), ready, instances_now, incomplete_count)
        return instances_now


def _is_complete(instance: FleetInstance | None) -> bool:
    """Whether the instance receives requests and, unless mixed, its KV path is verified."""
    if instance is None or not instance.selectable:
        return False
    return instance.role == Role.MIXED or instance.kv_path.verified
