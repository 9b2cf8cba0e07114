"""Assembles all parts of one operator process and keeps them running. Called by `main`.

The order matters: nothing is decided before every object has been listed once, and nothing is
written while another operator leads. When one part ends unexpectedly, the process ends and
Kubernetes restarts it; nothing is lost by that, because every decision follows from the cluster's
state.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from cleave.controller import handlers
from cleave.controller.cluster.agent_client import order_adapters, set_configured_role
from cleave.controller.cluster.client import KubeApiError, KubeClient
from cleave.controller.cluster.config_maps import read_config_map
from cleave.controller.cluster.executor import Executor
from cleave.controller.cluster.leader_election import LeaderElector, LeaseConfig
from cleave.controller.cluster.model_hub import ModelHub
from cleave.controller.cluster.prometheus_source import PrometheusSource
from cleave.controller.controller import WORKERS, Controller
from cleave.controller.metrics import OperatorCollector, OperatorMetrics
from cleave.controller.resync import Resync
from cleave.controller.settings import OperatorSettings
from cleave.controller.webhook import server
from cleave.manifests.gang import POD_GROUP
from cleave.options import declare, declare_each, parse_hosts, parse_port
from cleave.rpc.credentials import find_credentials

log = logging.getLogger(__name__)

ListFaults = Callable[[], list[str]]
"""Returns what is wrong, one line each; empty: nothing."""

_RETRY_S = 2.0
_MAX_ELECTION_IDLE_S = 30.0
"""The liveness probe fails when the election has not run for this long."""


@dataclass(frozen=True, slots=True)
class WebhookOptions:
    """Options of the validating webhook."""

    name: str = declare(
        "--webhook", "", "serve the validating webhook of this name", metavar="NAME"
    )
    """Name of its Service, its Secret and its ValidatingWebhookConfiguration; empty: there is no
    webhook."""
    port: int = declare("--webhook-port", 9443, parse=parse_port)
    certificate: str = declare(
        "--webhook-certificate",
        "operator",
        "who issues the webhook's certificate; secret: you, in the Secret of its name",
        choices=("operator", "cert-manager", "secret"),
    )


@dataclass(frozen=True, slots=True)
class ManagerOptions:
    """Options of one operator process."""

    hosts: tuple[str, ...] = declare(
        "--host",
        ("0.0.0.0",),  # noqa: S104 - probes and scrapes come from elsewhere
        "addresses of /healthz, /readyz, /metrics and the webhook",
        parse=parse_hosts,
        metavar="HOST,...",
    )
    port: int = declare("--port", 8081, parse=parse_port)
    namespaces: tuple[str, ...] = declare_each("--namespace", "watch this namespace only")
    lease: str = declare("--lease", "cleave-operator", "name of the leader election's Lease")
    identity: str = declare(
        "--identity",
        os.uname().nodename,
        "identity of this operator in the Lease (default: $POD_NAME)",
        env="POD_NAME",
    )
    webhook: WebhookOptions = WebhookOptions()
    settings: OperatorSettings = field(default_factory=OperatorSettings)
    lease_config: LeaseConfig = field(default_factory=LeaseConfig)


class Manager:
    """One operator process."""

    def __init__(self, kube: KubeClient, options: ManagerOptions) -> None:
        self._kube, self._options = kube, options
        self._metrics = OperatorMetrics()
        hub, token = options.settings.model_hub, os.environ.get("HF_TOKEN", "")
        server = options.settings.prometheus
        self._controller = Controller(
            options.settings,
            self._metrics,
            read_config_map=partial(read_config_map, kube),
            model_hub=ModelHub(hub, time.monotonic, token) if hub else None,
            prometheus=PrometheusSource(server, os.environ.get("PROMETHEUS_TOKEN", ""))
            if server
            else None,
        )
        self._leader = LeaderElector(
            kube, options.settings.namespace, options.lease, options.identity, options.lease_config
        )
        self._resync = Resync(kube, self._controller, options.namespaces)
        credentials = find_credentials()
        self._executor = Executor(
            kube,
            get_lease_s=lambda: self._leader.remaining_s,
            on_change=self._controller.on_change,
            on_delete=self._controller.on_deleted_by_write,
            clock=time.time,
            metrics=self._metrics,
            set_role=partial(set_configured_role, credentials),
            send_adapters=partial(order_adapters, credentials),
            list_owners=self._controller.cache.list_owners,
        )
        self._webhook = self._make_webhook()
        self._is_cache_filled = False
        registry = CollectorRegistry()
        registry.register(
            OperatorCollector(
                self._metrics,
                queued=lambda: len(self._controller.queue),
                objects=self._controller.cache.count,
                is_leading=lambda: self._leader.is_leading,
                statuses=self._controller.collect_statuses,
            )
        )
        ProcessCollector(registry=registry)
        alive, ready = self._list_liveness_faults, self._list_missing
        self._endpoints = OperatorEndpoints(alive, ready, registry)

    async def run(self) -> None:
        """Run until SIGTERM or SIGINT. Raises the error that has ended one of the parts."""
        await self._endpoints.start(self._options.hosts, self._options.port)
        try:
            await self._fill_cache()
            await self._run_parts()
        finally:
            await self._leader.resign()
            await self._controller.planner.close()
            await self._endpoints.stop()

    async def _fill_cache(self) -> None:
        """List every object once, with retries: API server and CRDs may become available later."""
        while True:
            try:
                await self._resync.fill()
                has_sets = await self._kube.serves("LeaderWorkerSet")
                has_groups = await self._kube.serves(POD_GROUP)
            except KubeApiError as error:
                log.warning(
                    "cannot list the objects of the cluster: %s; retry in %.0f s", error, _RETRY_S
                )
                await asyncio.sleep(_RETRY_S)
            else:
                settings = self._controller.settings
                self._controller.settings = replace(
                    settings, has_leader_worker_sets=has_sets, has_pod_groups=has_groups
                )
                self._is_cache_filled = True
                return

    async def _run_parts(self) -> None:
        elected, traffic = self._leader.elected, self._controller.traffic_poller
        parts: list[Coroutine[Any, Any, None]] = [
            self._leader.run(),
            self._resync.run(),
            self._controller.resync(elected),
            traffic.run_traffic_polls(elected, self._options.settings.traffic_poll_s),
            traffic.run_wake_up_polls(elected),
            *(self._controller.work(self._executor, elected) for _ in range(WORKERS)),
        ]
        if self._webhook is not None:
            parts.append(self._webhook.run())
        tasks = [asyncio.create_task(part) for part in parts]
        # Last: when kopf ends, it cancels every task that was created after it.
        watches = asyncio.create_task(
            handlers.run_watches(self._controller, self._metrics, self._options.namespaces)
        )
        try:
            await asyncio.wait([*tasks, watches], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*tasks, watches):
                task.cancel()
            results = await asyncio.gather(*tasks, watches, return_exceptions=True)
        errors = [
            each
            for each in results
            if isinstance(each, BaseException) and not isinstance(each, asyncio.CancelledError)
        ]
        # `main` has to know of a WatchError.
        errors.sort(key=lambda error: not isinstance(error, handlers.WatchError))
        for error in errors[1:]:
            log.error("a part of the operator has failed too", exc_info=error)
        if errors:
            raise errors[0]

    def _make_webhook(self) -> server.WebhookServer | None:
        webhook, options = self._options.webhook, self._options
        if not webhook.name:
            return None
        base = f"{webhook.name}.{options.settings.namespace}.svc"
        names = (base, f"{base}.cluster.local")
        store = server.SecretCertificateStore(self._kube, options.settings.namespace, webhook.name)
        issues = webhook.certificate == "operator"
        config = server.WebhookConfig(options.hosts, webhook.port, names, issues)
        rotator = server.CertificateRotator(store, names, issues_certificate=issues)
        inventory = self._controller.build_inventory
        settings = self._options.settings
        return server.WebhookServer(
            config, rotator, lambda: inventory().cluster, settings, self._metrics
        )

    def _list_liveness_faults(self) -> list[str]:
        """Why the liveness probe should fail: this process needs a restart."""
        faults = [f"the watch of {kind} has ended" for kind in self._resync.stale_watches]
        if self._is_cache_filled and self._leader.idle_s > _MAX_ELECTION_IDLE_S:
            faults.append("the leader election has stopped")
        return faults

    def _list_missing(self) -> list[str]:
        """Why the readiness probe should fail: this operator could not lead yet."""
        missing = (
            [] if self._is_cache_filled else ["the objects of the cluster have not been listed yet"]
        )
        if self._webhook is not None and not self._webhook.is_listening:
            missing.append("the webhook does not listen yet")
        return missing


class OperatorEndpoints:
    """HTTP server of /healthz, /readyz and /metrics; `start` and `stop` it."""

    def __init__(self, alive: ListFaults, ready: ListFaults, registry: CollectorRegistry) -> None:
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
