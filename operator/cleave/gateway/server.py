"""One gateway: its sockets, its sweeper, its fleet, and its end. Run by main, and by tests.

What is hard: the end. First /health says that it drains while new connections are still served, for
clients hear late that it goes; then they are refused, answers that run are finished, and only what
is still there after the drain time is cut.
"""

import asyncio
import logging
import math
import os
import time
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from cleave.gateway.admission.api_keys import KeysFile
from cleave.gateway.app.client_connection import ClientConnection
from cleave.gateway.app.handlers import Pages
from cleave.gateway.app.tls_handshake import Handshake
from cleave.gateway.config import GatewayConfig
from cleave.gateway.context import ClientSlot, Context
from cleave.gateway.endpoint_picker.server import PickerServer
from cleave.gateway.http.connection_limiter import Connections
from cleave.gateway.shared_state import Siblings
from cleave.gateway.tls import Certificate
from cleave.gateway.tracing.recorder import Watch, make_watch
from cleave.policy.role_flipping import make_terms
from cleave.router.agent_watcher import Fleet
from cleave.router.grpc_service import RouterServer
from cleave.router.registry import Directory
from cleave.router.role_flipper import Flip, PoolManager
from cleave.router.router import Router, Rules
from cleave.router.shared_router import SharedRouter
from cleave.router.watchdog import Rounds
from cleave.traffic import length_file

log = logging.getLogger(__name__)

SWEEP_S = 0.2
LET_IN_S = 0.01
"""Between two looks whether there is room for those who wait at the door."""
SWEEPS_OF_CLIENTS = 20
CLIENTS_AT_ONCE = 64
FILES_S = 5.0
BACKLOG = 4_096


class Gateway:
    """Start it, then stop it; one use."""

    def __init__(self, config: GatewayConfig, siblings: Siblings | None = None) -> None:
        """`siblings`: of which it is one process.

        Raises KeysError, LengthsError and TlsError when one of its files cannot be read."""
        directory = Directory(config.policy, siblings.open_books() if siblings else None)
        rules = Rules(
            config.whole_below_tokens,
            config.ttft_slo_ms or math.inf,
            config.tpot_slo_ms or math.inf,
        )
        self._config = config
        self._siblings = siblings
        self._keys = KeysFile(config.api_keys)
        self._certificate: Certificate | None = None
        if config.tls_certificate is not None and config.tls_key is not None:
            self._certificate = Certificate(config.tls_certificate, config.tls_key)
        made = SharedRouter if siblings else Router
        router = made(directory, config.fallback, rules)
        if config.lengths is not None:
            _foretell_by(config.lengths, router)
        self.context = Context(config, router, self._keys.keys, siblings=siblings)
        self.context.take_up()
        together = (siblings.name, siblings.count) if siblings else ()
        self._fleet = Fleet(config.agents, directory, time.monotonic, *together)
        self._pool_manager: PoolManager | None = None
        # One process is enough, and the first one is always there or about to be.
        if siblings is None or siblings.process == 0:
            terms = make_terms(config.ttft_slo_ms, config.min_prefill, config.min_decode)
            self._pool_manager = PoolManager(
                directory, config.flipping, terms, time.monotonic, self._note_flip
            )
        self._service = RouterServer(self.context.router, time.monotonic)
        self._picker = PickerServer(self.context)
        self._watch: Watch | None = None
        self._servers: list[asyncio.Server] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._unswept: list[ClientSlot] = []
        """Clients whose deadlines are still to be looked at in this round."""
        self._at_once = CLIENTS_AT_ONCE
        self.ending = asyncio.Event()
        """Set by whoever wants it to be stopped."""
        self.failed = False
        """Whether it is to be stopped because a part of it has failed."""
        self.port = config.port

    async def start(self) -> None:
        """Listen and follow the fleet.

        Raises OSError, DiscoveryError, TracingError, PickerError, and TlsError of the picker's.
        """
        config = self._config
        self._watch = make_watch(config, self.context.metrics)
        await self._fleet.start()
        pages = Pages(self.context, self._watch)
        self.port = await self._listen(config.port, pages, self.context.public, self._certificate)
        if config.internal_port:
            internal = Pages(self.context, internal=True)
            await self._listen(config.internal_port, internal, self.context.internal)
        if config.router_port:
            await self._service.start(f"{config.host}:{config.router_port}")
        if config.endpoint_picker_port:
            await self._picker.start(config.endpoint_picker_port, self.port)
        parts = [self._sweep(), self._let_in(), self._read_files()]
        if self._pool_manager is not None:
            parts.append(self._pool_manager.run())
        self._tasks = [self._keep(part) for part in parts]
        if self._siblings is not None:
            self._siblings.begin(os.getpid())

    async def stop(self) -> None:
        """Finish what runs, within the drain time, and let go of everything."""
        context = self.context
        context.draining = True
        if self._servers:
            await asyncio.sleep(self._config.timeouts.leave_s)
        while self._servers:
            self._servers.pop().close()
        picker = asyncio.create_task(self._picker.stop(self._config.timeouts.drain_s))
        deadline = context.clock() + self._config.timeouts.drain_s
        while context.exchanges and context.clock() < deadline:
            self._close_idle_clients()
            await asyncio.sleep(0.05)
        if context.exchanges:
            log.warning("%d requests are cut off", len(context.exchanges))
        self._close_idle_clients()
        await asyncio.sleep(0)
        for client in tuple(context.clients):
            client.drop()
        context.close_pools()
        for task in self._tasks:
            task.cancel()
        await picker
        await self._service.stop()
        await self._fleet.stop()
        context.leave_word()
        if self._watch is not None:
            await self._watch.stop()

    def _keep(self, part: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(part)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[None]) -> None:
        """Without deadlines or keys that are renewed it would look well and not be."""
        fault = None if task.cancelled() else task.exception()
        if fault is not None:
            log.critical("a part of the gateway has failed: it ends", exc_info=fault)
            self.failed = True
            self.ending.set()

    def _note_flip(self, flip: Flip) -> None:
        self.context.metrics.flips[flip.labels] += 1

    async def _listen(
        self,
        port: int,
        pages: Pages,
        connections: Connections,
        certificate: Certificate | None = None,
    ) -> int:
        def make_client() -> ClientConnection:
            return ClientConnection(self.context, pages, connections)

        def make_handshake(secret: Certificate) -> Handshake:
            return Handshake(self.context, secret.context, make_client)

        for host in self._config.hosts:
            server = await asyncio.get_running_loop().create_server(
                partial(make_handshake, certificate) if certificate else make_client,
                host,
                port,
                backlog=BACKLOG,
                reuse_port=self._siblings is not None,
            )
            self._servers.append(server)
            port = server.sockets[0].getsockname()[1]
        return port

    def _close_idle_clients(self) -> None:
        for client in tuple(self.context.clients):
            client.close_if_idle()

    async def _read_files(self) -> None:
        while True:
            await asyncio.sleep(FILES_S)
            if self._certificate is not None:
                self._certificate.refresh()
            self._keys.refresh()
            if self.context.keys is not self._keys.keys:
                self.context.use_keys(self._keys.keys)

    def _next_clients(self) -> list[ClientSlot]:
        """Some of the clients, all of them within a few seconds, which is soon enough for them.

        Ten thousand at once would take a hundredth of a core, and hold requests up for 3 ms.
        """
        if not self._unswept:
            self._unswept = list(self.context.clients)
            self._at_once = max(CLIENTS_AT_ONCE, len(self._unswept) // SWEEPS_OF_CLIENTS + 1)
        count = self._at_once
        part, self._unswept = self._unswept[:count], self._unswept[count:]
        return part

    async def _sweep(self) -> None:
        """Keep all deadlines with one timer: one per request would cost more than it serves."""
        context, rounds = self.context, Rounds(SWEEP_S)
        while True:
            await rounds.wait()
            now = context.swept_at = context.clock()
            context.discarded_bytes = 0
            if rounds.pause_s:
                context.excuse_engines(rounds.pause_s, now)
            if rounds.is_fair:
                for exchange in tuple(context.exchanges):
                    exchange.sweep(now)
                for client in self._next_clients():
                    client.sweep(now)
                context.door.sweep(now)
            context.metrics.waiting = sum(context.door.count_waiting().values())
            context.tell_siblings(now)
            context.sweep_pools(now)

    async def _let_in(self) -> None:
        """Who waits hears of own answers that make room at once, and of others' in this way."""
        door = self.context.door
        while True:
            await door.waited_for.wait()
            await asyncio.sleep(LET_IN_S)
            door.let_in(self.context.clock())


def _foretell_by(path: Path, router: Router) -> None:
    """Let a trained file foretell outputs, if it did better than what the router learns online."""
    found = length_file.read(path)
    if found.scores.is_better:
        router.lengths = found.tree
        log.info("outputs are foretold by %s: %s", path, found.scores.comparison)
    else:
        log.warning("%s is not used: %s", path, found.scores.comparison)
