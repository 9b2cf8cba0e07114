"""HTTPS server of the webhook around `cleave.controller.webhook.admission`, and its certificate.

Started by `cleave.controller.main` in every operator, also on standby. All operators share one
certificate through a Secret. The one that finds it missing or about to expire issues a new one; if
another was faster, it takes that one. The TLS context is reloaded in place, so that new connections
use a new certificate without a restart.
"""

import asyncio
import base64
import contextlib
import json
import logging
import ssl
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aiohttp import web

from cleave.api.cluster import Cluster
from cleave.controller.cluster.client import FIELD_MANAGER, JSON, KINDS, KubeApiError, KubeClient
from cleave.controller.metrics import OperatorMetrics
from cleave.controller.settings import OperatorSettings
from cleave.controller.webhook import certificates, connections
from cleave.controller.webhook.admission import ReviewError, review_admission
from cleave.controller.webhook.certificates import CertificateError, ServingCertificate
from cleave.controller.webhook.connections import WebhookConnections

log = logging.getLogger("cleave.webhook")

PATH = "/validate"
_ROTATION_CHECK_S = 600.0
"""Seconds between two checks of the Secret."""
_RETRY_S = 5.0
_MAX_CONFLICTS = 5
_TIMEOUT_S = 4.0
"""The API server waits 5 s with the chart's default."""
_MAX_REQUEST_BYTES = 4 << 20
"""More than the largest object that the API server stores."""
_MAX_FIELDS = 20_000
"""Colons in a request: bounds the time of its validation. A usual one has a few hundred, and those
of managedFields, which the API server sends along."""
_MAX_VALUES = 100_000
"""Commas and opening brackets, also in texts: bounds the memory of what is decoded."""
_SMALL_REQUEST_BYTES = 256 << 10
"""As many of these as there are connections are in memory at a time, of larger ones
_MAX_CONCURRENT."""
_MAX_CONCURRENT = 4
_CONFLICT = 409
_JSON_PATCH = "application/json-patch+json"


class CertificateStoreError(RuntimeError):
    """A request to the API server failed; it is retried."""


class SecretCertificateStore:
    """The Secret with the certificate, and the webhook configuration with its CA bundle. Both have
    the same name. The chart creates them, empty; the operator may update these two only."""

    def __init__(self, kube: KubeClient, namespace: str, name: str) -> None:
        self._kube = kube
        self._secret = KINDS["Secret"].build_path(namespace, name)
        self._configuration = KINDS["ValidatingWebhookConfiguration"].build_path(name=name)

    async def read_secret(self) -> dict[str, Any]:
        """Return the Secret. Raises CertificateStoreError."""
        return await self._request("GET", self._secret)

    async def replace_secret(self, secret: dict[str, Any]) -> bool:
        """Replace the Secret; False: it has changed. Raises CertificateStoreError."""
        query = {"fieldManager": FIELD_MANAGER}
        try:
            await self._kube.request("PUT", self._secret, body=secret, query=query)
        except KubeApiError as error:
            if error.status == _CONFLICT:
                return False
            raise CertificateStoreError(str(error)) from error
        return True

    async def read_bundles(self) -> list[str]:
        """Return `caBundle` of each webhook, empty text if unset. Raises CertificateStoreError."""
        configuration = await self._request("GET", self._configuration)
        hooks = configuration.get("webhooks", ())
        return [hook["clientConfig"].get("caBundle", "") for hook in hooks]

    async def write_bundle(self, bundle: str, count: int) -> None:
        """Write `caBundle` of the first `count` webhooks. Raises CertificateStoreError."""
        patch = [
            {"op": "add", "path": f"/webhooks/{index}/clientConfig/caBundle", "value": bundle}
            for index in range(count)
        ]
        await self._request("PATCH", self._configuration, patch)

    async def _request(self, method: str, path: str, patch: object = None) -> dict[str, Any]:
        query = {"fieldManager": FIELD_MANAGER} if patch is not None else None
        kind = _JSON_PATCH if patch is not None else JSON
        try:
            return await self._kube.request(
                method, path, body=patch, query=query, content_type=kind
            )
        except KubeApiError as error:
            raise CertificateStoreError(str(error)) from error


@dataclass(frozen=True, slots=True)
class WebhookConfig:
    """Configuration of the webhook server."""

    hosts: tuple[str, ...]
    port: int
    names: tuple[str, ...]
    """DNS names by which the API server calls it."""
    issues_certificate: bool
    """Whether the operator issues the certificate; False: others write the Secret."""


class CertificateRotator:
    """Keeps the certificate valid and its CA known to the API server."""

    def __init__(
        self,
        store: SecretCertificateStore,
        names: Sequence[str],
        *,
        issues_certificate: bool,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._store, self._names = store, names
        self._issues_certificate, self._now = issues_certificate, now

    async def rotate(self) -> ServingCertificate:
        """Return the certificate to serve. Raises CertificateError, CertificateStoreError."""
        certificate = await self._load_or_issue()
        if self._issues_certificate:
            await self._publish(certificate)
        return certificate

    async def _load_or_issue(self) -> ServingCertificate:
        for _ in range(_MAX_CONFLICTS):
            secret = await self._store.read_secret()
            current = certificates.from_secret(secret)
            fault = self._find_fault(current)
            if current is not None and (fault is None or not self._issues_certificate):
                return current
            if not self._issues_certificate:
                raise CertificateError("the Secret has no tls.crt and tls.key yet")
            trusted = current.ca_bundle if current else ""
            issued = certificates.issue(self._names, self._now(), trusted)
            secret["data"] = certificates.to_secret(issued)
            if await self._store.replace_secret(secret):
                log.info("issued a certificate: %s", fault)
                return issued
        text = f"the Secret was changed {_MAX_CONFLICTS} times while it was written"
        raise CertificateError(text)

    def _find_fault(self, current: ServingCertificate | None) -> str | None:
        if current is None:
            return "there was none"
        try:
            certificates.check(current, self._names, self._now())
        except CertificateError as error:
            return f"the old one {error}"
        return None

    async def _publish(self, certificate: ServingCertificate) -> None:
        ca_bundle = base64.b64encode(certificate.ca_bundle.encode()).decode()
        bundles = await self._store.read_bundles()
        if any(bundle != ca_bundle for bundle in bundles):
            await self._store.write_bundle(ca_bundle, len(bundles))
            log.info("wrote the CA bundle to the webhook configuration")


class WebhookServer:
    """Serves AdmissionReviews until it is cancelled."""

    def __init__(
        self,
        config: WebhookConfig,
        rotator: CertificateRotator,
        cluster: Callable[[], Cluster | None],
        settings: OperatorSettings = OperatorSettings(),  # noqa: B008 - a frozen value
        metrics: OperatorMetrics | None = None,
    ) -> None:
        self._settings, self._metrics = settings, metrics or OperatorMetrics()
        self._config, self._rotator, self._cluster = config, rotator, cluster
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._served: ServingCertificate | None = None
        self._limiter: WebhookConnections | None = None
        self._large_slots = asyncio.Semaphore(_MAX_CONCURRENT)
        # A thread is free again only after its review has ended, even one that is too late.
        self._threads = ThreadPoolExecutor(_MAX_CONCURRENT, "webhook")
        self.is_listening = False
        """Whether the server accepts connections."""

    async def run(self) -> None:
        """Serve as soon as there is a certificate, and rotate it; never returns."""
        while not await self._load():  # noqa: ASYNC110 - polled, there is no event
            await asyncio.sleep(_RETRY_S)
        application = web.Application(client_max_size=_MAX_REQUEST_BYTES)
        application.router.add_post(PATH, self._validate)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        assert runner.server is not None
        limiter = self._limiter = WebhookConnections(runner.server, self._context)
        try:
            async with contextlib.AsyncExitStack() as sockets, asyncio.TaskGroup() as tasks:
                for host in self._config.hosts:
                    listening = sockets.enter_context(connections.listen(host, self._config.port))
                    tasks.create_task(limiter.accept(listening))
                    log.info("listening on https://%s:%d%s", host, self._config.port, PATH)
                self.is_listening = True
                while True:
                    await asyncio.sleep(_ROTATION_CHECK_S)
                    await self._load()
        finally:
            self.is_listening = False
            limiter.close()
            await runner.cleanup()
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def _load(self) -> bool:
        """Load the certificate and return whether there is one; errors are logged and retried."""
        try:
            certificate = await self._rotator.rotate()
            if certificate != self._served:
                self._replace(certificate)
        except (CertificateStoreError, CertificateError, ssl.SSLError) as error:
            log.warning("the webhook's certificate: %s", error)
        return self._served is not None

    def _replace(self, certificate: ServingCertificate) -> None:
        """Serve another certificate, unless it is of no use and the present one is of any. Raises
        CertificateError and SSLError."""
        now = datetime.now(UTC)
        try:
            certificates.check_usable(certificate, now)
        except CertificateError as error:
            if self._served is not None and now < certificates.find_expiry(self._served):
                until = f"{certificates.find_expiry(self._served):%Y-%m-%d %H:%M} UTC"
                raise CertificateError(f"stays as it was, valid until {until}: {error}") from None
            log.error("the API server refuses the webhook's certificate: %s", error)
        # A pair that does not match would leave the context in use without a key.
        _load_into_context(certificate, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        _load_into_context(certificate, self._context)
        self._served = certificate
        self._metrics.webhook_expiry_s = certificates.find_expiry(certificate).timestamp()

    async def _validate(self, request: web.Request) -> web.Response:
        assert self._limiter is not None
        try:
            # What it waits for counts too: the API server has given up by then.
            with self._limiter.keep(request.protocol):
                async with asyncio.timeout(_TIMEOUT_S):
                    response = await self._review_body(request)
            return web.Response(text=response, content_type="application/json")
        except ReviewError as error:
            return web.Response(status=400, text=str(error))
        except TimeoutError:
            # The configuration's failurePolicy decides what the API server does then.
            return web.Response(status=503, text="the validation has timed out")

    async def _review_body(self, request: web.Request) -> str:
        """Raises ReviewError."""
        size = request.content_length
        if size is None or size > _MAX_REQUEST_BYTES:
            raise ReviewError(f"the request needs a length of at most {_MAX_REQUEST_BYTES} bytes")
        # Small ones, as the API server's are, do not wait for large ones that come slowly.
        slots = self._large_slots if size > _SMALL_REQUEST_BYTES else contextlib.nullcontext()
        async with slots:
            body = await request.read()
            return await asyncio.get_running_loop().run_in_executor(
                self._threads, _review, body, self._cluster(), self._settings
            )


def _review(body: bytes, cluster: Cluster | None, settings: OperatorSettings) -> str:
    """Review a request's body; returns the response's. Raises ReviewError."""
    if body.count(b":") > _MAX_FIELDS:
        raise ReviewError(f"the request has more than {_MAX_FIELDS} fields")
    if sum(map(body.count, (b",", b"[", b"{"))) > _MAX_VALUES:
        raise ReviewError(f"the request has more than {_MAX_VALUES} values")
    try:
        review = json.loads(body)
    except (ValueError, RecursionError):
        raise ReviewError("the request is not JSON") from None
    if not isinstance(review, dict):
        raise ReviewError("the request is not an object")
    return json.dumps(review_admission(review, cluster, settings))


def _load_into_context(certificate: ServingCertificate, context: ssl.SSLContext) -> None:
    """Load the certificate for new connections; Python loads certificates from files only."""
    with tempfile.TemporaryDirectory(prefix="cleave-webhook-") as folder:
        chain_file, key_file = Path(folder) / "tls.crt", Path(folder) / "tls.key"
        chain_file.write_text(certificate.cert_chain)
        key_file.touch(mode=0o600)
        key_file.write_text(certificate.key)
        context.load_cert_chain(chain_file, key_file)
