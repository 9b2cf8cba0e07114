"""HTTP endpoints of the operator: /healthz, /readyz and /metrics."""

from collections.abc import Callable, Sequence

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

ListFaults = Callable[[], list[str]]
"""Returns what is wrong, one line each; empty: nothing."""


class OperatorEndpoints:
    """A small HTTP server; `start` and `stop` it."""

    def __init__(
        self, *, alive: ListFaults, ready: ListFaults, registry: CollectorRegistry
    ) -> None:
        self._alive, self._ready, self._registry = alive, ready, registry
        self._runner: web.AppRunner | None = None

    @property
    def port(self) -> int:
        """The port it listens on; 0: it is stopped."""
        return int(self._runner.addresses[0][1]) if self._runner else 0

    async def start(self, hosts: Sequence[str], port: int) -> None:
        """Listen. Raises OSError."""
        application = web.Application()
        application.router.add_get("/healthz", self._handle_healthz)
        application.router.add_get("/readyz", self._handle_readyz)
        application.router.add_get("/metrics", self._handle_metrics)
        self._runner = web.AppRunner(application, access_log=None)
        await self._runner.setup()
        for host in hosts:
            await web.TCPSite(self._runner, host, port).start()

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _handle_healthz(self, _: web.Request) -> web.Response:
        return _build_response(self._alive())

    async def _handle_readyz(self, _: web.Request) -> web.Response:
        return _build_response(self._ready())

    async def _handle_metrics(self, _: web.Request) -> web.Response:
        body = generate_latest(self._registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


def _build_response(faults: list[str]) -> web.Response:
    return web.Response(status=503 if faults else 200, text="\n".join(faults) or "ok")
