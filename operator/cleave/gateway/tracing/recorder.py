"""Records requests for the access log and for traces. Used by the handlers, if either is enabled.

It decides for each request whether a record is needed; a request without one is a plain Exchange.
"""

import logging
from http import HTTPStatus
from typing import Protocol

from cleave import distribution
from cleave.gateway.admission.tenants import Tenant
from cleave.gateway.config import GatewayConfig
from cleave.gateway.context import Context
from cleave.gateway.http.completion_request import Completion
from cleave.gateway.http.headers import TRACEPARENT
from cleave.gateway.http.request_parser import Request
from cleave.gateway.metrics.gateway_metrics import Metrics
from cleave.gateway.proxy.client_stream import Client
from cleave.gateway.proxy.proxied_request import Exchange
from cleave.gateway.tracing.access_log import AccessLog
from cleave.gateway.tracing.instrumented_request import WatchedExchange
from cleave.gateway.tracing.request_record import Listener, Story, TracingError
from cleave.gateway.tracing.traceparent import make_span_id, read_context

log = logging.getLogger(__name__)

FLUSH_S = 2.0
"""Time to send queued traces when the gateway stops."""


class Tracing(Listener, Protocol):
    """Exports traces."""

    async def stop(self, seconds: float) -> None:
        """Send what is queued, within so many seconds."""


def make_watch(config: GatewayConfig, metrics: Metrics) -> "Watch | None":
    """The recorder of a gateway; None: neither access log nor tracing. Raises TracingError."""
    access_log = AccessLog() if config.access_log else None
    tracing = _make_tracing(config, metrics)
    if access_log is None and tracing is None:
        return None
    return Watch(access_log, tracing, config.trace_share)


def _make_tracing(config: GatewayConfig, metrics: Metrics) -> Tracing | None:
    if config.otlp_endpoint is None:
        return None
    try:
        from cleave.gateway.tracing import otel_exporter
    except ImportError:
        message = f"traces need the extra otel: {distribution.install(['otel'])}"
        if config.otlp_endpoint:
            raise TracingError(message) from None
        # The variables may be set for an entire cluster, so they must not stop the gateway.
        log.warning("%s; tracing is off", message)
        return None
    return otel_exporter.OtelTracing(config.otlp_endpoint, metrics.spans)


class Watch:
    """Decides for each request whether it is recorded, and passes on finished records."""

    def __init__(
        self, log: Listener | None = None, tracing: Tracing | None = None, trace_share: float = 0.0
    ) -> None:
        """`log` receives every request, `tracing` those that are sampled."""
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
        """The exchange for a request, with a record if one is needed."""
        trace = None
        if self._tracing is not None:
            trace = read_context(request.headers.get(TRACEPARENT), self._trace_share)
        if self._log is None and trace is not None and not trace.sampled:
            # Without this header, engines that trace would begin a trace of their own.
            fields = trace.write(trace.parent_id or make_span_id())
            return Exchange(
                context, client, request.path, request_id, completion, tenant, session, fields
            )
        # Clients may send any model name; only known ones are recorded.
        is_known = completion.model in context.router.directory.known
        record = Story(
            request_id.decode(),
            request.method.decode(),
            request.path.decode(),
            completion.model if is_known else "",
            context.clock(),
            tenant.name,
            completion.stream,
            trace,
            context.config.tls_certificate is not None,
        )
        return WatchedExchange(
            self, record, context, client, request.path, request_id, completion, tenant, session
        )

    def note(
        self, context: Context, request_id: bytes, status: int, method: bytes, path: bytes
    ) -> None:
        """Record a request that the gateway responded to by itself."""
        if self._log is not None:
            now = context.clock()
            record = Story(request_id.decode(), method.decode(), path.decode(), "", now)
            record.status = status
            record.end("refused" if status >= HTTPStatus.BAD_REQUEST else "ok", now)
            self._log.tell(record)

    def tell(self, record: Story) -> None:
        """A request has finished."""
        if self._log is not None:
            self._log.tell(record)
        if self._tracing is not None and record.trace is not None and record.trace.sampled:
            self._tracing.tell(record)

    async def stop(self) -> None:
        """Send queued traces."""
        if self._tracing is not None:
            await self._tracing.stop(FLUSH_S)
