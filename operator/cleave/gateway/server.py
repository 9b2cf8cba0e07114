"""One gateway: its sockets, its sweeper, its fleet, and its end. Run by main, and by tests.

What is hard: the end. New connections are refused first, answers that run are finished, and only
what is still there after the drain time is cut.
"""

import asyncio
import logging
import time

from cleave.gateway.client import ClientConnection
from cleave.gateway.config import GatewayConfig
from cleave.gateway.context import Context
from cleave.gateway.keys import read_keys
from cleave.gateway.pages import Pages
from cleave.router.directory import Directory
from cleave.router.fleet import Fleet
from cleave.router.router import Router
from cleave.router.service import RouterServer

log = logging.getLogger(__name__)

SWEEP_S = 0.2
BACKLOG = 4_096


class Gateway:
    """Start it, then stop it; one use."""

    def __init__(self, config: GatewayConfig) -> None:
        """Raises KeysError when the keys cannot be read."""
        directory = Directory()
        self._config = config
        self.context = Context(
            config, Router(directory, config.fallback), read_keys(config.api_keys)
        )
        self._fleet = Fleet(config.agents, directory, time.monotonic)
        self._service = RouterServer(self.context.router, time.monotonic)
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self.port = config.port

    async def start(self) -> None:
        """Listen and follow the fleet. Raises OSError and DiscoveryError."""
        config = self._config
        pages = Pages(self.context)
        await self._fleet.start()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: ClientConnection(self.context, pages), config.host, config.port, backlog=BACKLOG
        )
        self.port = self._server.sockets[0].getsockname()[1]
        if config.router_port:
            await self._service.start(f"{config.host}:{config.router_port}")
        self._sweeper = asyncio.create_task(self._sweep())

    async def stop(self) -> None:
        """Finish what runs, within the drain time, and let go of everything."""
        context = self.context
        context.draining = True
        if self._server is not None:
            self._server.close()
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
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self._service.stop()
        await self._fleet.stop()

    def _close_idle_clients(self) -> None:
        for client in tuple(self.context.clients):
            client.close_if_idle()

    async def _sweep(self) -> None:
        """Keep all deadlines with one timer: one per request would cost more than it serves."""
        context = self.context
        while True:
            await asyncio.sleep(SWEEP_S)
            now = context.clock()
            for exchange in tuple(context.exchanges):
                exchange.sweep(now)
            for client in tuple(context.clients):
                client.sweep(now)
            context.sweep_pools(now)
