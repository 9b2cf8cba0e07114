"""What the gateways told last of each deployment's instances, asked again when it matters.

Used by the controller. Asking costs a request per gateway; so a deployment is asked when its ready
instances have changed, before a decision that depends on load, and otherwise now and then.
"""

from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from cleave.api.role import Role
from cleave.controller import instances
from cleave.controller.instances import Instance

K = TypeVar("K", bound=Hashable)

_OLD_S = 45.0
_PARTIAL_S = 1.0
"""How long an answer counts that leaves something open, at first; twice as long each time."""
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
    """How many answers in a row have left something open."""

    @property
    def valid_s(self) -> float:
        """For how long it counts."""
        return min(_OLD_S, _PARTIAL_S * 2.0 ** (self.tries - 1)) if self.tries else _OLD_S


class Fleets(Generic[K]):
    """The last answers, by deployment."""

    def __init__(self, clock: Callable[[], float], ask: AskGateways = instances.ask) -> None:
        self._clock, self._ask = clock, ask
        self._told: dict[K, _Told] = {}

    def last(self, key: K) -> Known:
        """What was told last."""
        told = self._told.get(key)
        return told.instances if told else None

    async def known(self, key: K, gateways: Collection[str], ready: frozenset[str]) -> Known:
        """What is known; asked for when other pods are `ready` (names) than at the last answer."""
        told = self._told.get(key)
        if told and told.ready == ready and self._clock() - told.at_s < told.valid_s:
            return told.instances
        return await self._asked(key, gateways, ready)

    def again_after_s(self, key: K) -> float | None:
        """When to ask again because the last answer leaves something open; None: it does not."""
        told = self._told.get(key)
        return told.valid_s if told is not None and told.tries else None

    async def fresh(self, key: K, gateways: Collection[str]) -> Known:
        """What is true about now."""
        told = self._told.get(key)
        if told and self._clock() - told.at_s < _FRESH_S:
            return told.instances
        return await self._asked(key, gateways, told.ready if told else frozenset())

    def forget(self, key: K) -> None:
        """The deployment is gone."""
        self._told.pop(key, None)

    async def _asked(self, key: K, gateways: Collection[str], ready: frozenset[str]) -> Known:
        if not gateways or not ready:
            return self.last(key)
        answer = await self._ask([*map(instances.base_url, gateways)])
        found = self.last(key) if answer is None else answer
        before = self._told.get(key)
        earlier = before.tries if before and before.ready == ready else 0
        tries = (
            0 if all(_is_told((found or {}).get(name)) for name in ready) else min(earlier + 1, 8)
        )
        self._told[key] = _Told(self._clock(), ready, found, tries)
        return found


def _is_told(instance: Instance | None) -> bool:
    """Whether there is nothing to wait for: it is sent requests, and its KV path is verified."""
    if instance is None or not instance.selectable:
        return False
    return instance.role == Role.MIXED or instance.kv_path.verified
