"""Records requests for the access log and for traces. Used by the handlers, if either is enabled.

It decides for each request whether a record is needed; a request without one is a plain
ProxiedRequest.
"""

import logging
from http import HTTPStatus
from typing import Protocol

from cleave import distribution
from cleave.gateway.admission.tenants import Tenant
from cleave.gateway.config import GatewayConfig
from cleave.gateway.context import GatewayContext
from cleave.gateway.http.completion_request import CompletionRequest
from cleave.gateway.http.headers import TRACEPARENT
from cleave.gateway.http.request_parser import HttpRequest
from cleave.gateway.metrics.gateway_metrics import GatewayMetrics
from cleave.gateway.proxy.client_stream import ClientStream
from cleave.gateway.proxy.proxied_request import ProxiedRequest
from cleave.gateway.tracing.access_log import AccessLog
from cleave.gateway.tracing.recording_observer import RecordingObserver
from cleave.gateway.tracing.request_record import RequestListener, RequestRecord, TracingError
from cleave.gateway.tracing.traceparent import make_span_id, read_trace_context

log = logging.getLogger(__name__)

FLUSH_S = 2.0
"""Time to send queued traces when the gateway stops."""


class TraceExporter(RequestListener, Protocol):
    """Exports traces."""

    async def stop(self, seconds: float) -> None:
        """Send what is queued, within so many seconds."""


def make_recorder(config: GatewayConfig, metrics: GatewayMetrics) -> "RequestRecorder | None":
    """The recorder of a gateway; None: neither access log nor tracing. Raises TracingError."""
    access_log = AccessLog() if config.access_log else None
    tracing = _make_trace_exporter(config, metrics)
    if access_log is None and tracing is None:
        return None
    return RequestRecorder(access_log, tracing, config.trace_sample_ratio)


def _make_trace_exporter(config: GatewayConfig, metrics: GatewayMetrics) -> TraceExporter | None:
    if config.otlp_endpoint is None:
        return None
    try:
        from cleave.gateway.tracing import otel_exporter
    except ImportError:
        message = f"traces need the extra otel: {distribution.build_install_command(['otel'])}"
        if config.otlp_endpoint:
            raise TracingError(message) from None
        # The variables may be set for an entire cluster, so they must not stop the gateway.
        log.warning("%s; tracing is off", message)
        return None
    return otel_exporter.OtelExporter(config.otlp_endpoint, metrics.spans)


class RequestRecorder:
    """Decides for each request whether it is recorded, and passes on finished records."""

    def __init__(
        self, log: RequestListener | None, tracing: TraceExporter | None, trace_sample_ratio: float
    ) -> None:
        """`log` receives every request, `tracing` those that are sampled."""
        self._access_log = log
        self._trace_exporter = tracing
        self._trace_sample_ratio = trace_sample_ratio

    def create_request(
        self,
        context: GatewayContext,
        client: ClientStream,
        request: HttpRequest,
        path: bytes,
        request_id: bytes,
        completion: CompletionRequest,
        tenant: Tenant,
        session: bytes | None,
        sender: str,
    ) -> ProxiedRequest:
        """The proxied request, with a record if one is needed. `path`: of the engine, which may
        differ from that of a request that was translated."""
        arguments = context, client, path, request_id, completion, tenant, session, sender
        trace = None
        if self._trace_exporter is not None:
            trace = read_trace_context(request.headers.get(TRACEPARENT), self._trace_sample_ratio)
        if self._access_log is None and trace is not None and not trace.sampled:
            # Without this header, engines that trace would begin a trace of their own.
            fields = trace.format_header(trace.parent_id or make_span_id())
            return ProxiedRequest(*arguments, fields)
        # Clients may send any model name; only known ones are recorded.
        is_known = completion.model in context.router.registry.known_models
        record = RequestRecord(
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
        record.max_tokens = completion.output_tokens
        return ProxiedRequest(*arguments, b"", RecordingObserver(self, record, context.clock))

    def record_local_response(
        self, context: GatewayContext, request_id: bytes, status: int, method: bytes, path: bytes
    ) -> None:
        """Record a request that the gateway responded to by itself."""
        if self._access_log is not None:
            now = context.clock()
            record = RequestRecord(request_id.decode(), method.decode(), path.decode(), "", now)
            record.status = status
            record.end("refused" if status >= HTTPStatus.BAD_REQUEST else "ok", now)
            self._access_log.on_finished(record)

    def on_finished(self, record: RequestRecord) -> None:
        """A request has finished."""
        if self._access_log is not None:
            self._access_log.on_finished(record)
        if self._trace_exporter is not None and record.trace is not None and record.trace.sampled:
            self._trace_exporter.on_finished(record)

    async def stop(self) -> None:
        """Send queued traces."""
        if self._trace_exporter is not None:
            await self._trace_exporter.stop(FLUSH_S)
