"""What the gateways told last of each deployment's instances, asked again when it matters.

Used by the controller. Asking costs a request per gateway; so a deployment is asked when its ready
instances have changed, before a decision that depends on load, and otherwise now and then.
"""

from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from cleave.controller import instances
from cleave.controller.instances import Instance
from cleave.pods.labels import INTERNAL_PORT

K = TypeVar("K", bound=Hashable)

_OLD_S = 45.0
_PARTIAL_S = 5.0
"""How long an answer counts that does not say of every ready instance that its KV path works."""
_FRESH_S = 2.0

AskGateways = Callable[[Collection[str]], Awaitable[Mapping[str, Instance]]]


@dataclass(frozen=True, slots=True)
class _Told:
    at_s: float
    ready: frozenset[str]
    instances: Mapping[str, Instance]

    @property
    def is_whole(self) -> bool:
        """Whether there is nothing to wait for."""
        known = self.instances
        return all(name in known and known[name].kv_path.verified for name in self.ready)

    @property
    def valid_s(self) -> float:
        """For how long it counts."""
        return _OLD_S if self.is_whole else _PARTIAL_S


class Fleets(Generic[K]):
    """The last answers, by deployment."""

    def __init__(self, clock: Callable[[], float], ask: AskGateways = instances.ask) -> None:
        self._clock, self._ask = clock, ask
        self._told: dict[K, _Told] = {}

    def last(self, key: K) -> Mapping[str, Instance]:
        """What was told last."""
        told = self._told.get(key)
        return told.instances if told else {}

    async def known(
        self, key: K, gateways: Collection[str], ready: frozenset[str]
    ) -> Mapping[str, Instance]:
        """What is known; asked for when other pods are `ready` (names) than at the last answer."""
        told = self._told.get(key)
        if told and told.ready == ready and self._clock() - told.at_s < told.valid_s:
            return told.instances
        return await self._asked(key, gateways, ready)

    def again_after_s(self, key: K) -> float | None:
        """When to ask again because the last answer leaves something open; None: it does not."""
        told = self._told.get(key)
        return None if told is None or told.is_whole else _PARTIAL_S

    async def fresh(self, key: K, gateways: Collection[str]) -> Mapping[str, Instance]:
        """What is true about now."""
        told = self._told.get(key)
        if told and self._clock() - told.at_s < _FRESH_S:
            return told.instances
        return await self._asked(key, gateways, told.ready if told else frozenset())

    def forget(self, key: K) -> None:
        """The deployment is gone."""
        self._told.pop(key, None)

    async def _asked(
        self, key: K, gateways: Collection[str], ready: frozenset[str]
    ) -> Mapping[str, Instance]:
        if not gateways or not ready:
            return self.last(key)
        urls = [f"http://{_host(address)}:{INTERNAL_PORT}" for address in gateways]
        found = await self._ask(urls) or self.last(key)
        self._told[key] = _Told(self._clock(), ready, found)
        return found


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
