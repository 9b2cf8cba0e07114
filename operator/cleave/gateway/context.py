"""What the parts of one gateway share. Made by the server, read by connections and exchanges."""

import os
import time
from collections.abc import Callable
from typing import Protocol

from cleave.gateway.config import GatewayConfig
from cleave.gateway.door import Door
from cleave.gateway.engine import EnginePool
from cleave.gateway.health import Breaker
from cleave.gateway.keys import Keys
from cleave.gateway.metrics import Metrics, Slo
from cleave.gateway.traceparent import NAME
from cleave.router.instance import Target
from cleave.router.router import Router


class Sweepable(Protocol):
    """Something with a deadline that the sweeper keeps."""

    def sweep(self, now: float) -> None:
        """Act if the deadline has passed; `now` is the context's clock."""


class ClientSlot(Sweepable, Protocol):
    """An open client connection."""

    def close_if_idle(self) -> None:
        """Close unless a request is being read or answered."""

    def drop(self) -> None:
        """Close at once."""


class Context:
    """One gateway's state."""

    def __init__(
        self,
        config: GatewayConfig,
        router: Router,
        keys: Keys,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.router = router
        self.clock = clock
        """Seconds."""
        self.session_header = config.session_header.lower().encode()
        """Empty: none."""
        traced = {NAME} if config.otlp_endpoint is not None else set()
        self.also_read = frozenset({self.session_header} - {b""} | traced)
        """Headers of requests, beside those that are always read."""
        slo = Slo(config.ttft_slo_ms / 1_000, config.tpot_slo_ms / 1_000)
        self.metrics = Metrics(slo if slo.ttft_s > 0 else None)
        self.door = Door(config, router.directory, self.metrics)
        self.use_keys(keys)
        self.breaker = Breaker()
        self.clients: set[ClientSlot] = set()
        self.exchanges: set[Sweepable] = set()
        self.unanswered = 0
        """Requests that wait for the first byte of their answer."""
        self.draining = False
        self._pools: dict[str, EnginePool] = {}
        # Unique among gateways and their restarts: engines refuse or mix up equal ids.
        self._id_prefix = os.urandom(6).hex().encode()
        self._last_id = 0

    def use_keys(self, keys: Keys) -> None:
        """At the start, and whenever their file has changed."""
        self.keys = keys
        self.door.know(keys.tenants, self.clock())

    def make_id(self) -> bytes:
        """A request id that no client can bring about."""
        self._last_id += 1
        return b"%b-%x" % (self._id_prefix, self._last_id)

    def find_pool(self, target: Target) -> EnginePool:
        """The connections to one boot of an engine."""
        pool = self._pools.get(target.boot_id)
        if pool is None:
            config = self.config
            pool = EnginePool(
                target, config.engine_connections, config.timeouts.connect_s, self.clock
            )
            self._pools[target.boot_id] = pool
        return pool

    def sweep_pools(self, now: float) -> None:
        """Close idle connections and forget pools of engines that are gone."""
        self.breaker.sweep(now)
        for boot_id, pool in tuple(self._pools.items()):
            pool.sweep(now)
            if pool.empty:
                del self._pools[boot_id]

    def close_pools(self) -> None:
        """End every connection to every engine."""
        for pool in self._pools.values():
            pool.close()
