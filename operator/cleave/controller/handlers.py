"""Connects kopf's watches with the controller: every watch event goes into the cache.

Run by the manager. kopf lists, watches and reconnects. It is configured to write nothing, to keep
no state in objects and to run no change handlers, because reconciles are level-triggered: they
follow from the present state, not from changes.

What is hard: kopf ends when the API server answers one of its requests with an error, as API
servers do for seconds while they start (401 without tokens' accounts, 403 without roles, 404
without custom resources). And it does not end well: watches that are cancelled together with what
pauses them go on without a consumer, so that kopf waits for them and reports nothing. So errors
are retried below kopf, and what is left of a kopf that has failed is reported as WatchError.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import aiohttp
import kopf

from cleave.controller.cluster.client import KINDS
from cleave.controller.controller import Controller
from cleave.controller.metrics import OperatorMetrics
from cleave.controller.resync import WATCHED_KINDS

log = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 2.0
_REPORT_S = 30.0
"""How often an error that goes on is logged, in seconds."""
_STOP_S = 5.0
"""How long kopf may take to end, in seconds."""
_GONE = 410
"""kopf lists again after this one: the version that it watches from is too old."""
_UNAUTHORIZED = 401
_NO_ERROR = 400


class WatchError(RuntimeError):
    """kopf has failed and left tasks that cannot be cancelled: the process has to end."""


async def run_watches(
    controller: Controller, metrics: OperatorMetrics, namespaces: Sequence[str]
) -> None:
    """Watch until a signal ends the process; no `namespaces`: the whole cluster.

    Raises what kopf has failed with, or WatchError when it does not end.
    """
    ended = asyncio.Event()
    # Before kopf's: when it ends, it cancels every task that was created after it.
    ending = asyncio.create_task(ended.wait())
    registry = build_registry(controller, metrics)

    async def on_cleanup(**_: Any) -> None:  # noqa: ANN401 - kopf's own
        ended.set()

    kopf.on.cleanup(registry=registry)(on_cleanup)
    operator = asyncio.create_task(
        kopf.operator(
            registry=registry,
            settings=build_settings(),
            standalone=True,
            clusterwide=not namespaces,
            namespaces=namespaces,
        ),
        name="kopf",
    )
    try:
        await asyncio.wait([operator, ending], return_when=asyncio.FIRST_COMPLETED)
    finally:
        ending.cancel()
        if not ended.is_set():
            operator.cancel()
        await asyncio.wait([operator], timeout=_STOP_S)
        if not operator.done():
            raise WatchError("the watches have failed and do not end")
    operator.result()


def build_registry(controller: Controller, metrics: OperatorMetrics) -> kopf.OperatorRegistry:
    """Register the login, and an event handler for every kind that is watched."""

    async def on_event(event: kopf.RawEvent, **_: Any) -> None:  # noqa: ANN401 - kopf's own
        manifest, kind = dict(event["object"]), str(event["object"]["kind"])
        metrics.events[kind, event["type"] or "LISTED"] += 1
        if event["type"] == "DELETED":
            controller.on_delete(manifest)
        else:
            controller.on_change(manifest)

    handlers = kopf.OperatorRegistry()
    kopf.on.login(registry=handlers)(_log_in)
    for kind in WATCHED_KINDS:
        kopf.on.event(*_get_resource(kind), id=kind, registry=handlers)(on_event)
    return handlers


def build_settings() -> kopf.OperatorSettings:
    """kopf's settings: watch only, write nothing."""
    options = kopf.OperatorSettings()
    options.posting.enabled = False
    # The kinds are known; a scan for others would need further permissions.
    options.scanning.disabled = True
    # Of requests that do not reach the API server.
    options.networking.error_backoffs = _Backoffs()
    options.queueing.exit_timeout = 0.5
    # `main` still cleans up after kopf has ended.
    options.process.ultimate_exiting_timeout = None
    # Else kopf copies each event several times to compute a difference that is not used.
    options.persistence.diffbase_storage = _NoDifferences()
    options.persistence.progress_storage = _NoProgress()
    for kind, selector in WATCHED_KINDS.items():
        if selector:
            options.watching.label_selectors[_get_resource(kind)] = selector
    return options


class _Backoffs(Iterable[float]):
    """Pauses between attempts in seconds, without an end; iterated by each request."""

    def __iter__(self) -> Iterator[float]:
        pause_s = _FIRST_BACKOFF_S
        while True:
            yield pause_s
            pause_s = min(2 * pause_s, _MAX_BACKOFF_S)


async def _log_in(**context: Any) -> kopf.AiohttpSession | None:  # noqa: ANN401 - kopf's own
    """Return a session with the service account or the kubeconfig file that retries errors."""
    info = kopf.login_via_client(**context)
    if info is None:
        return None

    async def retry_errors(
        request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        reported_at = -_REPORT_S
        for pause_s in _Backoffs():
            response = await send(request)
            if response.status < _NO_ERROR or response.status == _GONE:
                return response
            if time.monotonic() - reported_at >= _REPORT_S:
                reported_at = time.monotonic()
                path, status = request.url.path, response.status
                log.warning("%s: the API server answers %d; trying again", path, status)
            response.release()
            await asyncio.sleep(pause_s)
            if response.status == _UNAUTHORIZED and (fresh := kopf.login_via_client(**context)):
                # Tokens of service accounts are replaced while they are in use.
                request.headers.update(fresh.as_http_headers())
        raise AssertionError("unreachable")

    return kopf.AiohttpSession(
        server=info.server,
        default_namespace=info.default_namespace,
        aiohttp_session=aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
            headers=info.as_http_headers(),
            middlewares=(retry_errors,),
        ),
    )


def _get_resource(kind: str) -> tuple[str, str, str]:
    """Group, version and plural of a kind, as kopf takes them."""
    group, _, version = KINDS[kind].version.rpartition("/")
    return group, version, KINDS[kind].plural


class _NoDifferences(kopf.DiffBaseStorage):
    """Stores no last-handled state of objects: nothing is compared."""

    def build(self, **_: Any) -> kopf.BodyEssence:  # noqa: ANN401
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:  # noqa: ANN401
        return None

    def store(self, **_: Any) -> None:  # noqa: ANN401
        pass


class _NoProgress(kopf.ProgressStorage):
    """Stores no progress of handlers, as there are no change handlers."""

    def fetch(self, **_: Any) -> kopf.ProgressRecord | None:  # noqa: ANN401
        return None

    def store(self, **_: Any) -> None:  # noqa: ANN401
        pass

    purge = touch = store

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        return essence
