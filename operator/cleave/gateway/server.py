"""One gateway process: listeners, deadline sweeper, agent watcher and shutdown. Run by main.

What is hard: the shutdown. First /health reports draining while new connections are still
accepted, because load balancers notice late; then the listeners close, running requests finish,
and those left after the drain timeout are cut off.
"""

import asyncio
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from cleave.api.enums import FlippingMode
from cleave.gateway.admission.api_keys import ApiKeysFile
from cleave.gateway.app.client_connection import ClientConnection, RequestHandler
from cleave.gateway.app.cors import CorsConnection, CorsPolicy
from cleave.gateway.app.cross_site_filter import CrossSiteFilter
from cleave.gateway.app.handlers import GatewayRequestHandler
from cleave.gateway.app.tls_connection import TlsConnection
from cleave.gateway.config import GatewayConfig
from cleave.gateway.context import ClientSlot, GatewayContext
from cleave.gateway.endpoint_picker.server import EndpointPickerServer
from cleave.gateway.event_loop_faults import EventLoopFaults, contain
from cleave.gateway.http.connection_limiter import ConnectionLimiter
from cleave.gateway.shared_state import SharedGatewayState
from cleave.gateway.tls import TlsCertificate, make_grpc_credentials
from cleave.gateway.tracing.recorder import RequestRecorder, make_recorder
from cleave.gateway.witness.pair_recorder import send_proofs
from cleave.gateway.witness.witness import Witness
from cleave.policy.role_flipping import build_thresholds
from cleave.router.agent_watcher import AgentWatcher
from cleave.router.grpc_service import RouterServer
from cleave.router.registry import InstanceRegistry
from cleave.router.role_flipper import RoleFlip, RoleFlipper, send_flip
from cleave.router.router import Router, RoutingRules, SharedRouter
from cleave.router.watchdog import WatchdogTimer
from cleave.rpc.agent_discovery import AgentDiscovery
from cleave.rpc.plan_thresholds import PlanThresholds
from cleave.time_slices import Steps, run_at_once, run_in_slices

log = logging.getLogger(__name__)

TICK_S = 0.2
ADMIT_INTERVAL_S = 0.01
"""Interval between attempts to admit queued requests."""
TICKS_PER_CLIENT_CYCLE = 20
MIN_CLIENTS_PER_TICK = 64
FILE_CHECK_INTERVAL_S = 5.0
BACKLOG = 4_096
ACCEPTS_PER_TURN = 4
"""Of the event loop, which accepts one connection at a time from each listening descriptor: with
one of them, a flood of connections makes others wait for many turns to be accepted."""


class GatewayServer:
    """Call `start`, then `stop`; it cannot be started again."""

    def __init__(self, config: GatewayConfig, shared: SharedGatewayState | None = None) -> None:
        """`shared`: state shared with the other processes of this gateway; None: it has none.

        Raises ApiKeysError, LengthsError and TlsError when a configured file cannot be read."""
        load = shared.open_load_accounting() if shared else None
        registry = InstanceRegistry(config.policy, load, config.model_names)
        ttft_ms, tpot_ms = config.ttft_slo_ms or math.inf, config.tpot_slo_ms or math.inf
        thresholds = build_thresholds(config.ttft_slo_ms, config.min_prefill, config.min_decode)
        headroom_ms = thresholds.headroom_ms if config.flipping is FlippingMode.AUTO else 0.0
        rules = RoutingRules(ttft_ms=ttft_ms, tpot_ms=tpot_ms, headroom_ms=headroom_ms)
        self._config = config
        self._shared_state = shared
        self._api_keys_file = ApiKeysFile(config.api_keys)
        router_class = SharedRouter if shared else Router
        prefixes = shared.prefix_memory if shared else None
        router = router_class(registry, config.fallback, rules, prefix_memory=prefixes)
        self.context = GatewayContext(config, router, self._api_keys_file.keys, shared)
        self.context.certificates = _load_certificates(config)
        self.context.restore_counters()
        group = (shared.gateway_id, shared.num_processes) if shared else ()
        agents = AgentDiscovery(config.agents)
        self._send_proofs = partial(send_proofs, agents)
        self._agent_watcher = AgentWatcher(
            agents,
            registry,
            time.monotonic,
            *group,
            deployment=config.deployment,
            on_thresholds=self._apply_thresholds,
        )
        self._role_flipper: RoleFlipper | None = None
        self._witness: Witness | None = None
        # One process is enough, and the supervisor keeps the first one running.
        if shared is None or shared.process_index == 0:
            self._role_flipper = RoleFlipper(
                *(registry, config.flipping, thresholds, time.monotonic, self._record_flip),
                partial(send_flip, agents),
            )
            if config.witness_share:
                self._witness = Witness(self.context, config.witness_share, self._send_proofs)
        self._router_server = RouterServer(self.context.router, time.monotonic)
        self._endpoint_picker = EndpointPickerServer(self.context)
        self._recorder: RequestRecorder | None = None
        self._servers: list[asyncio.Server] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._unchecked_clients: list[ClientSlot] = []
        """Clients whose deadlines have not been checked in this cycle."""
        self._clients_per_tick = MIN_CLIENTS_PER_TICK
        self.stop_requested = asyncio.Event()
        """Set by main or by a failed task; main then calls `stop`."""
        self.failed = False
        """Whether it stops because one of its tasks has failed."""
        self.port = config.port

    async def start(self) -> None:
        """Listen, and watch the agents.
        Raises OSError, DiscoveryError, TracingError, EndpointPickerError."""
        config, context = self._config, self.context
        asyncio.get_running_loop().set_exception_handler(EventLoopFaults().handle)
        self._recorder = make_recorder(config, context.metrics)
        await self._agent_watcher.start()
        origins, hosts = config.allowed_origins, config.allowed_hosts
        policy = CorsPolicy(origins) if origins else None
        handler: RequestHandler = GatewayRequestHandler(context, self._recorder)
        internal: RequestHandler = GatewayRequestHandler(context, internal=True)
        if hosts:
            handler = CrossSiteFilter(handler, hosts, policy)
            internal = CrossSiteFilter(internal, hosts, None)
        limiter = context.client_limiter
        context.refresh_certificates()
        certificate = context.certificates.get("https")
        self.port = await self._listen(config.port, handler, limiter, certificate, policy)
        if config.internal_port:
            await self._listen(config.internal_port, internal, context.internal_limiter)
        if config.router_port:
            secrets = make_grpc_credentials(
                context.certificates["router"].read_again, config.router_client_ca
            )
            await self._router_server.start(config.host, config.router_port, secrets)
        if config.endpoint_picker_port:
            await self._endpoint_picker.start(config.endpoint_picker_port, self.port)
        parts = [self._check_deadlines(), self._admit_waiting(), self._reload_files()]
        if self._role_flipper is not None:
            parts.append(self._role_flipper.run())
        if self._witness is not None:
            parts.append(self._witness.run())
        self._tasks = [self._start_task(part) for part in parts]
        if self._shared_state is not None:
            self._shared_state.register_process(os.getpid())

    async def stop(self) -> None:
        """Finish running requests within the drain timeout, then free all resources."""
        context = self.context
        context.draining = True
        if self._servers:
            await asyncio.sleep(self._config.timeouts.shutdown_delay_s)
        while self._servers:
            self._servers.pop().close()
        picker = asyncio.create_task(self._endpoint_picker.stop(self._config.timeouts.drain_s))
        deadline = context.clock() + self._config.timeouts.drain_s
        while context.active_requests and context.clock() < deadline:
            self._close_idle_clients()
            await asyncio.sleep(0.05)
        if context.active_requests:
            log.warning("%d requests are cut off", len(context.active_requests))
        self._close_idle_clients()
        await asyncio.sleep(0)
        for client in tuple(context.clients):
            client.drop()
        context.close_pools()
        for task in self._tasks:
            task.cancel()
        await picker
        await self._router_server.stop()
        await self._agent_watcher.stop()
        run_at_once(context.save_counters())
        if self._recorder is not None:
            await self._recorder.stop()

    def _start_task(self, part: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(part)
        task.add_done_callback(self._handle_task_end)
        return task

    def _handle_task_end(self, task: asyncio.Task[None]) -> None:
        """Stop the gateway: without deadlines or key reloads it would look healthy but not be."""
        fault = None if task.cancelled() else task.exception()
        if fault is not None:
            log.critical("a task of the gateway has failed: shutting down", exc_info=fault)
            self.failed = True
            self.stop_requested.set()

    def _apply_thresholds(self, planned: PlanThresholds) -> None:
        log.info("thresholds of the plan: %s", planned)
        self.context.set_thresholds(planned)

    def _record_flip(self, flip: RoleFlip) -> None:
        self.context.metrics.flips[flip.labels] += 1

    async def _listen(
        self,
        port: int,
        handler: RequestHandler,
        limiter: ConnectionLimiter,
        certificate: TlsCertificate | None = None,
        policy: CorsPolicy | None = None,
    ) -> int:
        def make_client() -> ClientConnection:
            if policy is not None:
                return CorsConnection(self.context, handler, limiter, policy)
            return ClientConnection(self.context, handler, limiter)

        def make_tls(secret: TlsCertificate) -> TlsConnection:
            return TlsConnection(self.context, secret, make_client)

        loop, shares = asyncio.get_running_loop(), self._shared_state is not None
        make: Callable[[], asyncio.BaseProtocol]
        make = partial(make_tls, certificate) if certificate else make_client
        for host in self._config.hosts:
            server = await loop.create_server(make, host, port, backlog=BACKLOG, reuse_port=shares)
            self._servers.append(server)
            port = server.sockets[0].getsockname()[1]
            for listener in server.sockets * (ACCEPTS_PER_TURN - 1):
                again = socket.socket(fileno=os.dup(listener.fileno()))
                self._servers.append(await loop.create_server(make, sock=again, backlog=BACKLOG))
        return port

    def _close_idle_clients(self) -> None:
        for client in tuple(self.context.clients):
            client.close_if_idle()

    async def _reload_files(self) -> None:
        while True:
            await asyncio.sleep(FILE_CHECK_INTERVAL_S)
            self.context.refresh_certificates()
            self._api_keys_file.refresh()
            self.context.metrics.keys_stale = int(self._api_keys_file.is_stale)
            if self.context.api_keys is not self._api_keys_file.keys:
                self.context.set_api_keys(self._api_keys_file.keys)

    def _take_clients(self) -> list[ClientSlot]:
        """The next batch of clients; all of them are returned within a few seconds.
        Checking ten thousand at once would take 1% of a core and delay requests by 3 ms."""
        if not self._unchecked_clients:
            self._unchecked_clients = list(self.context.clients)
            self._clients_per_tick = max(
                MIN_CLIENTS_PER_TICK, len(self._unchecked_clients) // TICKS_PER_CLIENT_CYCLE + 1
            )
        count = self._clients_per_tick
        part = self._unchecked_clients[:count]
        del self._unchecked_clients[:count]
        return part

    async def _check_deadlines(self) -> None:
        """Check all deadlines with one timer, which is cheaper than one per request."""
        context, timer = self.context, WatchdogTimer(TICK_S)
        while True:
            await timer.wait()
            now = context.last_tick_at = context.clock()
            context.discarded_bytes = 0
            if timer.stall_s:
                context.discount_pause(timer.stall_s, now)
            if timer.is_reliable:
                await run_in_slices(self._check_each(now))
            context.metrics.waiting = sum(context.admission.count_waiting().values())
            flex = context.admission.flex
            context.metrics.flex_waiting = flex.count_waiting()
            context.metrics.flex_in_flight = context.metrics.flex_waiting + flex.count_running()
            context.publish_process_state(now)
            context.expire_pools(now)

    def _check_each(self, now: float) -> Steps[None]:
        """Check the deadlines of requests and clients; many may pass at the same time."""
        active = self.context.active_requests
        for request in tuple(active):
            if request in active:
                contain(request.fail, request.check_deadline, now)
                yield
        for client in self._take_clients():
            contain(client.fail, client.check_deadline, now)
            yield
        yield from self.context.admission.expire_waiting(now)

    async def _admit_waiting(self) -> None:
        """Admit queued requests when requests of other processes or gateways have ended; the end of
        an own request admits them at once."""
        admission = self.context.admission
        while True:
            await admission.has_waiters.wait()
            await asyncio.sleep(ADMIT_INTERVAL_S)
            admission.admit_all_waiting(self.context.clock())


def _load_certificates(config: GatewayConfig) -> dict[str, TlsCertificate]:
    """By port. Raises TlsError."""
    pairs = {
        "https": (config.tls_certificate, config.tls_key),
        "router": (config.router_certificate, config.router_key),
        "endpoint_picker": (config.endpoint_picker_certificate, config.endpoint_picker_key),
    }
    return {
        port: TlsCertificate(certificate, key)
        for port, (certificate, key) in pairs.items()
        if certificate is not None and key is not None
    }
