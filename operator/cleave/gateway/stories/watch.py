"""Who hears of a gateway's requests: the access log of all, traces of a share of them.

Asked by the pages for each request, if a gateway has one at all. A request that nobody wants to
hear of gets a plain exchange, any other one that keeps its story.
"""

import logging
from http import HTTPStatus
from typing import Protocol

from cleave import distribution
from cleave.gateway.admission.tenants import Tenant
from cleave.gateway.completion import Completion
from cleave.gateway.config import GatewayConfig
from cleave.gateway.context import Context
from cleave.gateway.counts.metrics import Metrics
from cleave.gateway.exchanges.audience import Client
from cleave.gateway.exchanges.exchange import Exchange
from cleave.gateway.head import TRACEPARENT
from cleave.gateway.request import Request
from cleave.gateway.stories.access_log import AccessLog
from cleave.gateway.stories.story import Listener, Story, TracingError
from cleave.gateway.stories.traceparent import make_span_id, read_context
from cleave.gateway.stories.watched import WatchedExchange

log = logging.getLogger(__name__)

FLUSH_S = 2.0
"""At the end, for traces that wait to be sent."""


class Tracing(Listener, Protocol):
    """Sends traces away."""

    async def stop(self, seconds: float) -> None:
        """Send what waits, for so long at most."""


def make_watch(config: GatewayConfig, metrics: Metrics) -> "Watch | None":
    """Who hears of a gateway's requests; None: nobody wants to. Raises TracingError."""
    access_log = AccessLog() if config.access_log else None
    tracing = _make_tracing(config, metrics)
    if access_log is None and tracing is None:
        return None
    return Watch(access_log, tracing, config.trace_share)


def _make_tracing(config: GatewayConfig, metrics: Metrics) -> Tracing | None:
    if config.otlp_endpoint is None:
        return None
    try:
        from cleave.gateway.stories import tracing
    except ImportError:
        lack = f"traces need the extra otel: {distribution.install(['otel'])}"
        if config.otlp_endpoint:
            raise TracingError(lack) from None
        # Variables are set for whole clusters, and no reason not to serve.
        log.warning("%s; nothing is traced", lack)
        return None
    return tracing.OtelTracing(config.otlp_endpoint, metrics.spans)


class Watch:
    """Decides for each request whether its story is kept, and tells it."""

    def __init__(
        self, log: Listener | None = None, tracing: Tracing | None = None, trace_share: float = 0.0
    ) -> None:
        """`log` hears of every request, `tracing` of those that are sampled."""
        self._log = log
        self._tracing = tracing
        self._trace_share = trace_share

    def open(
        self,
        context: Context,
        client: Client,
        request: Request,
        request_id: bytes,
        completion: Completion,
        tenant: Tenant,
        session: bytes | None,
    ) -> Exchange:
        """What shall answer a request."""
        trace = None
        if self._tracing is not None:
            trace = read_context(request.headers.get(TRACEPARENT), self._trace_share)
        if self._log is None and trace is not None and not trace.sampled:
            # Engines that trace would begin a trace of their own if they were told nothing.
            fields = trace.write(trace.parent_id or make_span_id())
            return Exchange(
                context, client, request.path, request_id, completion, tenant, session, fields
            )
        # Clients may name anything a model; only names of ours are told.
        known = completion.model in context.router.directory.known
        story = Story(
            request_id.decode(),
            request.method.decode(),
            request.path.decode(),
            completion.model if known else "",
            context.clock(),
            tenant.name,
            completion.stream,
            trace,
            context.config.tls_certificate is not None,
        )
        return WatchedExchange(
            self, story, context, client, request.path, request_id, completion, tenant, session
        )

    def note(
        self, context: Context, request_id: bytes, status: int, method: bytes, path: bytes
    ) -> None:
        """A request has been answered without an engine."""
        if self._log is not None:
            now = context.clock()
            story = Story(request_id.decode(), method.decode(), path.decode(), "", now)
            story.status = status
            story.end("refused" if status >= HTTPStatus.BAD_REQUEST else "ok", now)
            self._log.tell(story)

    def tell(self, story: Story) -> None:
        """A request is over."""
        if self._log is not None:
            self._log.tell(story)
        if self._tracing is not None and story.trace is not None and story.trace.sampled:
            self._tracing.tell(story)

    async def stop(self) -> None:
        """Send what waits to be sent."""
        if self._tracing is not None:
            await self._tracing.stop(FLUSH_S)
