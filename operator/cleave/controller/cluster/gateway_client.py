"""Caches what the gateways report of each deployment's instances.

Used by the controller. A refresh costs a request per gateway; so it happens when the set of ready
instances has changed, before a decision that depends on load, and otherwise every `_OLD_S` seconds.
"""

from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from cleave.api.role import Role
from cleave.controller.cluster import instance_status
from cleave.controller.cluster.instance_status import Instance

K = TypeVar("K", bound=Hashable)

_OLD_S = 45.0
_PARTIAL_S = 1.0
"""An incomplete answer is used for this long at first, then twice as long each time."""
_FRESH_S = 2.0

Known = Mapping[str, Instance] | None
"""Instances by pod; None: no gateway has answered yet."""
AskGateways = Callable[[Collection[str]], Awaitable[Known]]


@dataclass(frozen=True, slots=True)
class _Told:
    at_s: float
    ready: frozenset[str]
    instances: Known
    tries: int
    """Consecutive answers that were incomplete."""

    @property
    def valid_s(self) -> float:
        """Seconds for which the answer is used."""
        return min(_OLD_S, _PARTIAL_S * 2.0 ** (self.tries - 1)) if self.tries else _OLD_S


class Fleets(Generic[K]):
    """The last answer of the gateways, by deployment."""

    def __init__(self, clock: Callable[[], float], ask: AskGateways = instance_status.ask) -> None:
        self._clock, self._ask = clock, ask
        self._told: dict[K, _Told] = {}

    def last(self, key: K) -> Known:
        """Return the cached answer."""
        cached = self._told.get(key)
        return cached.instances if cached else None

    async def known(self, key: K, gateways: Collection[str], ready: frozenset[str]) -> Known:
        """Return the cached answer, refreshed when it is old or other pods are `ready` (names)."""
        cached = self._told.get(key)
        if cached and cached.ready == ready and self._clock() - cached.at_s < cached.valid_s:
            return cached.instances
        return await self._asked(key, gateways, ready)

    def again_after_s(self, key: K) -> float | None:
        """Seconds until a retry of an incomplete answer; None: it is complete."""
        cached = self._told.get(key)
        return cached.valid_s if cached is not None and cached.tries else None

    async def fresh(self, key: K, gateways: Collection[str]) -> Known:
        """Return an answer that is at most `_FRESH_S` seconds old."""
        cached = self._told.get(key)
        if cached and self._clock() - cached.at_s < _FRESH_S:
            return cached.instances
        return await self._asked(key, gateways, cached.ready if cached else frozenset())

    def forget(self, key: K) -> None:
        """Drop the answer: the deployment is gone, or its instances have changed."""
        self._told.pop(key, None)

    async def _asked(self, key: K, gateways: Collection[str], ready: frozenset[str]) -> Known:
        if not gateways or not ready:
            return self.last(key)
        response = await self._ask([*map(instance_status.base_url, gateways)])
        instances_now = self.last(key) if response is None else response
        previous = self._told.get(key)
        incomplete_before = previous.tries if previous and previous.ready == ready else 0
        incomplete_count = (
            0
            if all(_is_told((instances_now or {}).get(name)) for name in ready)
            else min(incomplete_before + 1, 8)
        )
        self._told[key] = _Told(self._clock(), ready, instances_now, incomplete_count)
        return instances_now


def _is_told(instance: Instance | None) -> bool:
    """Whether the instance receives requests and, unless mixed, its KV path is verified."""
    if instance is None or not instance.selectable:
        return False
    return instance.role == Role.MIXED or instance.kv_path.verified
