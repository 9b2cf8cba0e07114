"""State that the components of one gateway process share. Created by the server."""

import os
import time
from typing import Protocol

from cleave.gateway.admission.api_keys import ApiKeys
from cleave.gateway.admission.controller import AdmissionController
from cleave.gateway.admission.wrong_keys import WrongKeys
from cleave.gateway.config import GatewayConfig
from cleave.gateway.http.address_debts import AddressDebts
from cleave.gateway.http.address_turns import AddressTurns
from cleave.gateway.http.buffer_budget import BufferBudget
from cleave.gateway.http.connection_limiter import ConnectionLimiter, LimitedConnection
from cleave.gateway.http.headers import CORS_REQUEST_HEADERS, CROSS_SITE_HEADERS, TRACEPARENT
from cleave.gateway.http.write_batcher import WriteBatcher
from cleave.gateway.metrics.gateway_metrics import GatewayMetrics, SloTargets
from cleave.gateway.metrics.multiprocess import CounterSaver, restore_counters
from cleave.gateway.shared_state import SharedGatewayState
from cleave.gateway.tls import TlsCertificate
from cleave.gateway.upstream.circuit_breaker import CircuitBreaker
from cleave.gateway.upstream.connection_pool import EnginePool
from cleave.gateway.upstream.retry_budget import RetryBudget
from cleave.gateway.upstream.suspect_requests import SuspectRequests
from cleave.gateway.upstream.suspect_senders import SuspectSenders
from cleave.router.instance import Target
from cleave.router.router import Router
from cleave.rpc.plan_thresholds import PlanThresholds
from cleave.time_slices import SliceQueue, Steps, TurnQueue, run_at_once

MAX_INTERNAL_CLIENTS = 256
"""And at most a quarter of other clients, because open files may be few."""
MIN_INTERNAL_CLIENTS = 8
INTERNAL_BYTES = 4 << 20
"""Memory of the internal port's clients, so that there is always room for them."""
MAX_HANDSHAKES = 2_048
HANDSHAKE_MEMORY_SHARE = 1 / 4
"""Of the memory of all clients, for TLS handshakes."""
HANDSHAKE_SHARE = 1 / 2
"""Of the event loop's time, for TLS handshakes."""
ENGINE_SHARE = 1 / 2
"""For large requests to engines and large pieces of answers; tokens of streams are none."""
LARGE_BODY_SHARE = 1 / 8
"""Share of the event loop's time for reading large requests."""
TRANSLATION_SHARE = 1 / 4
PAGE_SHARE = 1 / 16
CLIENT_SHARE = 1 / 2
"""For what clients send in large pieces."""
KEYLESS_SHARE = 1 / 4
OWN_SHARE = 1 / 8
SAVE_INTERVAL_S = 1.0
"""Interval at which a process saves its counters."""


class Expirable(Protocol):
    """Something with a deadline that the sweeper checks."""

    def check_deadline(self, now: float) -> None:
        """Act if the deadline has passed; `now` is the context's clock."""

    def fail(self) -> None:
        """End with an error, or close, after a fault of this program."""


class RunningRequest(Expirable, Protocol):
    """A request that is being served."""

    @property
    def model(self) -> str:
        """As the client named it."""


class ClientSlot(Expirable, LimitedConnection, Protocol):
    """An open client connection, or one whose TLS handshake is in progress."""

    def close_if_idle(self) -> None:
        """Close unless a request is being read or answered."""


class GatewayContext:
    """The state of one gateway process."""

    def __init__(
        self,
        config: GatewayConfig,
        router: Router,
        api_keys: ApiKeys,
        shared_state: SharedGatewayState | None = None,
    ) -> None:
        """`shared_state`: shared with the other processes of this gateway; None: it has none."""
        self.config = config
        self.router = router
        self.clock = clock = time.monotonic
        """Seconds."""
        self.shared_state = shared_state
        self.session_header = config.session_header.lower().encode()
        """Lowercase name of the session header; empty: no session affinity."""
        traced = {TRACEPARENT} if config.otlp_endpoint is not None else set()
        cors = CORS_REQUEST_HEADERS if config.allowed_origins else frozenset()
        sites = CROSS_SITE_HEADERS if config.allowed_hosts else frozenset()
        self.extra_headers = frozenset({self.session_header} - {b""} | traced | cors | sites)
        """Lowercase names of request headers to keep besides those that are always kept."""
        targets_ms = config.ttft_slo_ms, config.tpot_slo_ms, config.itl_p99_slo_ms
        slo = SloTargets(*(target_ms / 1_000 for target_ms in targets_ms))
        self.metrics = GatewayMetrics(slo if slo.ttft_s > 0 else None)
        self.metrics.reuse_times = router.reuse_times
        self.admission = AdmissionController(
            config, router.registry, self.metrics, shared_state, router.headroom_ms
        )
        self.wrong_keys = WrongKeys()
        self.set_api_keys(api_keys)
        self.set_thresholds(PlanThresholds())
        self.circuit_breaker = CircuitBreaker()
        self.retry_budget = RetryBudget(config.retry_share, self._list_active_models)
        self.suspect_requests = SuspectRequests()
        self.suspect_senders = SuspectSenders()
        self.write_batcher = WriteBatcher()
        self.certificates: dict[str, TlsCertificate] = {}
        """By port: https, router, endpoint_picker. Set by the server."""
        self.engine_turns = TurnQueue(ENGINE_SHARE, clock)
        """Connections to engines with much to send, or of which much has been read."""
        self.clients: set[ClientSlot] = set()
        """Clients of both ports, and TLS handshakes."""
        self.buffer_budget = budget = BufferBudget(config.max_buffered_bytes)
        """Memory of all clients: their connections, requests and answers."""
        self.client_limiter = ConnectionLimiter("clients", config.max_clients, clock, budget=budget)
        budget.close_idle = self.client_limiter.close_one
        kind, internal = "clients of the internal port", BufferBudget(INTERNAL_BYTES)
        self.internal_limiter = ConnectionLimiter(
            kind,
            max(min(MAX_INTERNAL_CLIENTS, config.max_clients // 4), MIN_INTERNAL_CLIENTS),
            clock,
            budget=internal,
        )
        """Separate, so that clients cannot lock out probes and the operator."""
        share = HANDSHAKE_MEMORY_SHARE * config.max_buffered_bytes
        self.handshake_limiter = ConnectionLimiter("TLS handshakes", MAX_HANDSHAKES, clock, share)
        """They count as clients, too."""
        self.address_debts = AddressDebts(clock)
        self.handshake_turns = AddressTurns(HANDSHAKE_SHARE, clock, self.address_debts)
        self.discarded_bytes = 0
        """Bytes received from rejected clients since the sweeper ran last."""
        self.large_bodies = SliceQueue(LARGE_BODY_SHARE, clock)
        """Large requests that are being read."""
        self.system_first: set[str] = set()
        """Models whose chat templates have refused a system message that was not the first."""
        self.translations = SliceQueue(TRANSLATION_SHARE, clock)
        """Smaller requests that are being translated."""
        self.public_pages = SliceQueue(PAGE_SHARE, clock)
        """Pages for clients that are being built."""
        self.client_turns = TurnQueue(CLIENT_SHARE, clock)
        """Clients of which much has been read, or more than a request."""
        self.keyless_turns = AddressTurns(KEYLESS_SHARE, clock, self.address_debts)
        """Clients without credit that have sent no request to an engine."""
        self.own_work = SliceQueue(OWN_SHARE, clock)
        """Pages of the internal port that are being built, and counters that are being saved."""
        self.last_tick_at = clock()
        """When the sweeper ran last."""
        self.active_requests: set[RunningRequest] = set()
        self.num_awaiting_first_byte = 0
        """Requests that wait for the first byte of their response."""
        self.queue_limit = config.queue_limit
        """This process's limit of `num_awaiting_first_byte`."""
        self.draining = False
        self._pools: dict[tuple[str, str], EnginePool] = {}
        # Unique among gateways and their restarts: engines reject or mix up equal IDs.
        self._id_prefix = os.urandom(6).hex().encode()
        self._last_id = 0
        self._next_save_at = 0.0
        self._servable_model = ""
        """The model that could be served when this was looked at last."""
        self._counter_saver = (
            CounterSaver(self.metrics, shared_state) if shared_state is not None else None
        )

    def set_api_keys(self, api_keys: ApiKeys) -> None:
        """Set the keys and tenants, at the start and whenever their file has changed."""
        self.api_keys = api_keys
        self.admission.set_tenants(api_keys.tenants, self.clock())

    def set_thresholds(self, planned: PlanThresholds) -> None:
        """Apply the plan's thresholds, at the start and whenever they change; the flags of the
        gateway count where the plan has none."""
        whole_below = planned.whole_below_tokens or self.config.whole_below_tokens
        self.router.set_short_prompt_tokens(whole_below)
        self.ahead_from_tokens = planned.ahead_from_tokens or self.config.ahead_from_tokens
        """Prompts from this length on are transferred while they are computed; 0: none."""
        self.metrics.whole_below_tokens = whole_below
        self.metrics.ahead_from_tokens = self.ahead_from_tokens

    def restore_counters(self) -> None:
        """Restore the counters that this process's predecessor saved."""
        shared = self.shared_state
        if shared is not None:
            run_at_once(restore_counters(self.metrics, shared, shared.process_index))

    def publish_process_state(self, now: float) -> None:
        """Publish a heartbeat and counts for the other processes; called by the sweeper."""
        shared, unanswered = self.shared_state, self.num_awaiting_first_byte
        if shared is None:
            return
        shared.publish_heartbeat(now, unanswered, self.metrics.in_flight)
        self.queue_limit = shared.compute_queue_limit(unanswered, self.config.queue_limit)
        if now >= self._next_save_at:
            self._next_save_at = now + SAVE_INTERVAL_S
            self.own_work.start(self.save_counters())

    def save_counters(self) -> Steps[None]:
        """Save this process's counters."""
        if self._counter_saver is not None:
            yield from self._counter_saver.save()

    def can_serve(self) -> Steps[bool]:
        """Whether any model can be served now; mostly the first look shows it."""
        models = self.router.registry.models
        for name in [self._servable_model, *models]:
            if name in models and not self.router.explain_unavailable(name):
                self._servable_model = name
                return True
            yield
        return False

    def count_in_flight(self) -> int:
        """Requests in flight in all processes."""
        shared = self.shared_state
        return self.metrics.in_flight if shared is None else shared.count_in_flight()

    def make_request_id(self) -> bytes:
        """A new request ID, unique among gateways and restarts."""
        self._last_id += 1
        return b"%b-%x" % (self._id_prefix, self._last_id)

    def get_pool(self, target: Target) -> EnginePool:
        """The connection pool of one boot of an engine, at its address: another agent may have
        reported the same boot."""
        key = target.engine_url, target.boot_id
        pool = self._pools.get(key)
        if pool is None:
            limit, connect_s = self.config.engine_connections, self.config.timeouts.connect_s
            pool = EnginePool(
                target, limit, connect_s, self.clock, self.write_batcher, self.engine_turns
            )
            self._pools[key] = pool
        return pool

    def _list_active_models(self) -> list[str]:
        return [request.model for request in self.active_requests]

    def discount_pause(self, pause_s: float, now: float) -> None:
        """Exclude a stall of this process from the engines' stall detection."""
        for pool in self._pools.values():
            pool.stall_detector.discount_pause(pause_s, now)

    def expire_pools(self, now: float) -> None:
        """Close idle connections, and remove pools of engines that are gone."""
        self.circuit_breaker.expire(now)
        self.suspect_requests.expire(now)
        self.suspect_senders.expire(now)
        for key, pool in tuple(self._pools.items()):
            pool.close_idle(now)
            if pool.is_empty:
                del self._pools[key]

    def close_pools(self) -> None:
        """Close all connections to engines."""
        for pool in self._pools.values():
            pool.close()

    def refresh_certificates(self) -> None:
        """Read certificates again that have changed, and publish when they expire."""
        for port, certificate in self.certificates.items():
            certificate.refresh()
            self.metrics.certificate_expiries[port] = certificate.loaded.not_after.timestamp()
