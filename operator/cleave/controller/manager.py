"""Assembles all parts of one operator process and keeps them running. Called by `main`.

What is hard: the order. Nothing is decided before every object has been listed once, and nothing is
written while another operator leads. When one part ends unexpectedly, the process ends and
Kubernetes restarts it; nothing is lost by that, because every decision follows from the cluster's
state.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

import kopf
from prometheus_client import CollectorRegistry, ProcessCollector

from cleave.controller import handlers
from cleave.controller.cluster.client import ApiError, Kube
from cleave.controller.cluster.executor import Executor
from cleave.controller.cluster.leader_election import Leader, Terms
from cleave.controller.controller import WORKERS, Controller
from cleave.controller.http_endpoints import Pages
from cleave.controller.metrics import Collector, Metrics
from cleave.controller.resync import Sweep
from cleave.controller.settings import Settings
from cleave.controller.webhook.certificate_store import KubeStore
from cleave.controller.webhook.server import Keeper, Webhook, WebhookConfig

log = logging.getLogger(__name__)

_AGAIN_S = 2.0
_QUIET_S = 30.0
"""The liveness probe fails when the election has not run for this long."""


@dataclass(frozen=True, slots=True)
class WebhookOptions:
    """Options of the validating webhook."""

    name: str
    """Name of its Service, its Secret and its ValidatingWebhookConfiguration."""
    port: int = 9443
    issues: bool = True
    """Whether the operator issues the certificate; False: cert-manager does."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of one operator process."""

    identity: str
    namespace: str
    """The operator's own namespace, where the Lease is."""
    hosts: tuple[str, ...] = ("0.0.0.0",)  # noqa: S104 - probes and scrapes come from elsewhere
    port: int = 8081
    lease: str = "cleave-operator"
    namespaces: tuple[str, ...] = ()
    """Namespaces to watch; empty: all."""
    webhook: WebhookOptions | None = None
    settings: Settings = field(default_factory=Settings)
    terms: Terms = field(default_factory=Terms)


class Operator:
    """One operator process."""

    def __init__(self, kube: Kube, options: Options) -> None:
        self._kube, self._options = kube, options
        self._metrics = Metrics()
        self._controller = Controller(options.settings, self._metrics)
        self._leader = Leader(
            kube, options.namespace, options.lease, options.identity, options.terms
        )
        self._sweep = Sweep(kube, self._controller, options.namespaces)
        self._executor = Executor(
            kube,
            may_write=lambda: self._leader.is_leading,
            seen=self._controller.seen,
            gone=self._controller.written_off,
            clock=time.time,
            metrics=self._metrics,
        )
        self._webhook = self._make_webhook()
        self._is_filled = False
        registry = CollectorRegistry()
        registry.register(
            Collector(
                self._metrics,
                queued=lambda: len(self._controller.queue),
                objects=self._controller.store.count,
                is_leading=lambda: self._leader.is_leading,
                statuses=self._controller.statuses,
            )
        )
        ProcessCollector(registry=registry)
        self._pages = Pages(alive=self._faults, ready=self._missing, registry=registry)

    async def run(self) -> None:
        """Run until SIGTERM or SIGINT. Raises the error that has ended one of the parts."""
        await self._pages.start(self._options.hosts, self._options.port)
        try:
            await self._fill()
            await self._run_parts()
        finally:
            await self._leader.resign()
            await self._controller.desk.close()
            await self._pages.stop()

    async def _fill(self) -> None:
        """List every object once, with retries: API server and CRDs may become available later."""
        while True:
            try:
                await self._sweep.fill()
                has_sets = await self._kube.serves("LeaderWorkerSet")
            except ApiError as error:
                log.warning(
                    "cannot list the objects of the cluster: %s; retry in %.0f s", error, _AGAIN_S
                )
                await asyncio.sleep(_AGAIN_S)
            else:
                settings = self._controller.settings
                self._controller.settings = replace(settings, has_sets=has_sets)
                self._is_filled = True
                return

    async def _run_parts(self) -> None:
        elected, traffic = self._leader.elected, self._controller.watching
        parts: list[Coroutine[Any, Any, None]] = [
            self._leader.run(),
            self._sweep.run(),
            self._controller.resync(elected),
            traffic.watch_traffic(elected, self._options.settings.watch_s),
            traffic.watch_sleepers(elected),
            *(self._controller.work(self._executor, elected) for _ in range(WORKERS)),
        ]
        if self._webhook is not None:
            parts.append(self._webhook.run())
        tasks = [asyncio.create_task(part) for part in parts]
        # Last: when kopf ends, it cancels every task that was created after it.
        watches = asyncio.create_task(self._watch())
        try:
            await asyncio.wait([*tasks, watches], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*tasks, watches):
                task.cancel()
            results = await asyncio.gather(*tasks, watches, return_exceptions=True)
        for each in results:
            if isinstance(each, BaseException) and not isinstance(each, asyncio.CancelledError):
                raise each

    async def _watch(self) -> None:
        namespaces = self._options.namespaces
        await kopf.operator(
            registry=handlers.registry(self._controller, self._metrics),
            settings=handlers.settings(),
            standalone=True,
            clusterwide=not namespaces,
            namespaces=namespaces,
        )

    def _make_webhook(self) -> Webhook | None:
        webhook, options = self._options.webhook, self._options
        if webhook is None:
            return None
        base = f"{webhook.name}.{options.namespace}.svc"
        names = (base, f"{base}.cluster.local")
        store = KubeStore(self._kube, options.namespace, webhook.name)
        return Webhook(
            WebhookConfig(options.hosts, webhook.port, names, webhook.issues),
            Keeper(store, names, issues=webhook.issues),
            lambda: self._controller.inventory().cluster,
        )

    def _faults(self) -> list[str]:
        """Why the liveness probe should fail: this process needs a restart."""
        faults = [f"the watch of {kind} has ended" for kind in self._sweep.dead]
        if self._is_filled and self._leader.silent_s > _QUIET_S:
            faults.append("the leader election has stopped")
        return faults

    def _missing(self) -> list[str]:
        """Why the readiness probe should fail: this operator could not take over yet."""
        missing = [] if self._is_filled else ["the objects of the cluster have not been listed yet"]
        if self._webhook is not None and not self._webhook.is_listening:
            missing.append("the webhook does not listen yet")
        return missing
