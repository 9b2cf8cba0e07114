"""What the parts of one gateway share. Made by the server, read by connections and exchanges."""

import os
import time
from collections.abc import Callable
from typing import Protocol

from cleave.gateway.admission.api_keys import Keys
from cleave.gateway.admission.controller import Door
from cleave.gateway.config import GatewayConfig
from cleave.gateway.http.connection_limiter import Connection, Connections
from cleave.gateway.http.headers import TRACEPARENT
from cleave.gateway.http.write_batcher import Outbox
from cleave.gateway.metrics.gateway_metrics import Metrics, Slo
from cleave.gateway.metrics.multiprocess import restore, save
from cleave.gateway.shared_state import Siblings
from cleave.gateway.upstream.circuit_breaker import Breaker
from cleave.gateway.upstream.connection_pool import EnginePool
from cleave.router.instance import Target
from cleave.router.router import Router

MAX_INTERNAL_CLIENTS = 256
MAX_HANDSHAKES = 2_048
"""At once; each takes some 50 KiB, of which a client that says nothing uses nothing."""
SAVE_S = 1.0
"""Between two times that a process leaves word of what it has counted."""


class Sweepable(Protocol):
    """Something with a deadline that the sweeper keeps."""

    def sweep(self, now: float) -> None:
        """Act if the deadline has passed; `now` is the context's clock."""


class ClientSlot(Sweepable, Connection, Protocol):
    """An open client connection, or one whose TLS handshake is under way."""

    def close_if_idle(self) -> None:
        """Close unless a request is being read or answered."""


class Context:
    """One gateway's state."""

    def __init__(
        self,
        config: GatewayConfig,
        router: Router,
        keys: Keys,
        clock: Callable[[], float] = time.monotonic,
        siblings: Siblings | None = None,
    ) -> None:
        """`siblings`: where several processes are one gateway."""
        self.config = config
        self.router = router
        self.clock = clock
        """Seconds."""
        self.siblings = siblings
        self.session_header = config.session_header.lower().encode()
        """Empty: none."""
        traced = {TRACEPARENT} if config.otlp_endpoint is not None else set()
        self.also_read = frozenset({self.session_header} - {b""} | traced)
        """Headers of requests, beside those that are always read."""
        slo = Slo(config.ttft_slo_ms / 1_000, config.tpot_slo_ms / 1_000)
        self.metrics = Metrics(slo if slo.ttft_s > 0 else None)
        self.door = Door(config, router.directory, self.metrics, siblings)
        self.use_keys(keys)
        self.breaker = Breaker()
        self.outbox = Outbox()
        self.clients: set[ClientSlot] = set()
        """Of both ports, and handshakes."""
        self.public = Connections("clients", config.max_clients, clock)
        self.internal = Connections("clients of the internal port", MAX_INTERNAL_CLIENTS, clock)
        """Counted apart, so that clients cannot keep probes and the operator out."""
        self.handshakes = Connections("TLS handshakes", MAX_HANDSHAKES, clock)
        """Clients follow when they are done."""
        self.partial_bytes = 0
        """Memory of requests that are not whole, of all clients."""
        self.discarded_bytes = 0
        """Of what refused clients still sent, since the sweeper ran last."""
        self.large_body_at = 0.0
        """When the next large body may be handled."""
        self.swept_at = clock()
        """When the sweeper ran last."""
        self.exchanges: set[Sweepable] = set()
        self.unanswered = 0
        """Requests that wait for the first byte of their answer."""
        self.queue_limit = config.queue_limit
        """How many may; less what siblings have."""
        self.draining = False
        self._pools: dict[str, EnginePool] = {}
        # Unique among gateways and their restarts: engines refuse or mix up equal ids.
        self._id_prefix = os.urandom(6).hex().encode()
        self._last_id = 0
        self._save_at = 0.0

    def use_keys(self, keys: Keys) -> None:
        """At the start, and whenever their file has changed."""
        self.keys = keys
        self.door.know(keys.tenants, self.clock())

    def take_up(self) -> None:
        """Go on from what this process's predecessor has left."""
        if self.siblings is not None:
            restore(self.metrics, self.siblings.read_counts(self.siblings.process))

    def tell_siblings(self, now: float) -> None:
        """That this process lives, and what they need to know of it; called by the sweeper."""
        siblings = self.siblings
        if siblings is None:
            return
        siblings.beat(now, self.unanswered, self.metrics.in_flight)
        self.queue_limit = siblings.find_room(self.unanswered, self.config.queue_limit)
        if now >= self._save_at:
            self._save_at = now + SAVE_S
            self.leave_word()

    def leave_word(self) -> None:
        """Of what this process has counted."""
        if self.siblings is not None:
            save(self.metrics, self.siblings)

    def count_in_flight(self) -> int:
        """Requests being served, by siblings as well."""
        siblings = self.siblings
        return self.metrics.in_flight if siblings is None else siblings.count_in_flight()

    def make_id(self) -> bytes:
        """A request id that no client can bring about."""
        self._last_id += 1
        return b"%b-%x" % (self._id_prefix, self._last_id)

    def find_pool(self, target: Target) -> EnginePool:
        """The connections to one boot of an engine."""
        pool = self._pools.get(target.boot_id)
        if pool is None:
            config = self.config
            limit, connect_s = config.engine_connections, config.timeouts.connect_s
            pool = EnginePool(target, limit, connect_s, self.clock, self.outbox)
            self._pools[target.boot_id] = pool
        return pool

    def excuse_engines(self, pause_s: float, now: float) -> None:
        """This process stood still for so long: no engine is to blame for that."""
        for pool in self._pools.values():
            pool.pulse.excuse(pause_s, now)

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
