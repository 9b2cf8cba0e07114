"""Exports the spans of sampled requests to an OpenTelemetry collector. Imported only if configured.

Called by `recorder` when a request has finished; a thread of the SDK sends the spans in batches, so
the event loop never waits for a collector. What is hard: a slow or dead collector may cost spans,
but neither memory nor time nor many log lines: the queue is bounded, and lost spans are counted.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Sequence
from threading import Thread
from urllib.parse import urlsplit

from opentelemetry import trace as otel
from opentelemetry.context import Context as TraceScope
from opentelemetry.sdk import environment_variables as variables
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from cleave.gateway.tracing.request_record import RequestRecord, TracingError
from cleave.gateway.tracing.spans import SpanValue, build_spans

log = logging.getLogger(__name__)

QUEUE_SPANS = 4_096
"""Spans that wait to be sent; further ones are dropped."""
BATCH_SPANS = 128
"""Encoding takes a third of a millisecond per ten spans and holds the interpreter lock."""
DELAY_MS = 1_000.0
WARNING_INTERVAL_S = 60.0
"""Between two warnings about an unreachable collector."""

_KINDS = {kind.name.lower(): kind for kind in otel.SpanKind}


class OtelExporter:
    """Exports request records as spans."""

    def __init__(self, endpoint: str, counts: dict[str, int]) -> None:
        """`endpoint`: the collector's URL; empty: from OpenTelemetry's environment variables.
        `counts`: spans by result, updated here. Raises TracingError."""
        self._exporter = _CountingExporter(_make_exporter(endpoint), counts)
        self._id_generator = _PresetIdGenerator()
        counts.update(exported=0, failed=0, dropped=0)
        self._counts = counts
        self._num_submitted = 0
        # The sampling decision was made before: only sampled requests come here.
        self._provider = TracerProvider(
            ALWAYS_ON, _describe_process(), shutdown_on_exit=False, id_generator=self._id_generator
        )
        processor = BatchSpanProcessor(
            self._exporter,
            # Never full: `on_finished` drops what exceeds QUEUE_SPANS.
            max_queue_size=QUEUE_SPANS + BATCH_SPANS,
            schedule_delay_millis=DELAY_MS,
            max_export_batch_size=BATCH_SPANS,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("cleave.gateway")
        # The SDK logs every failed export; here it is logged once a minute.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)

    def on_finished(self, record: RequestRecord) -> None:
        """A request has finished: queue its spans."""
        trace = record.trace
        assert trace is not None
        spans = list(build_spans(record))
        if self._num_submitted - self._exporter.num_done + len(spans) > QUEUE_SPANS:
            self._counts["dropped"] += len(spans)
            return
        self._num_submitted += len(spans)
        self._id_generator.trace_id = trace.trace_id
        epoch_s = time.time() - time.monotonic()
        try:
            for value in spans:
                self._emit_span(value, trace.trace_id, epoch_s)
        except Exception:  # noqa: BLE001 - the caller must still finish the response
            self._exporter.record_lost(len(spans))

    async def stop(self, seconds: float) -> None:
        """Send the queued spans, within so many seconds."""
        ending = Thread(target=self._provider.shutdown, name="traces", daemon=True)
        ending.start()
        deadline = time.monotonic() + seconds
        while ending.is_alive() and time.monotonic() < deadline:  # noqa: ASYNC110 - a thread's end
            await asyncio.sleep(0.02)
        if ending.is_alive():
            # Aborts the export in progress and all further ones.
            self._exporter.shutdown()

    def _emit_span(self, value: SpanValue, trace_id: int, epoch_s: float) -> None:
        scope, flags = TraceScope(), otel.TraceFlags(otel.TraceFlags.SAMPLED)
        if value.parent_id:
            # The parent of the server's span is the client's, hence remote.
            parent = otel.SpanContext(trace_id, value.parent_id, value.kind == "server", flags)
            scope = otel.set_span_in_context(otel.NonRecordingSpan(parent), scope)
        self._id_generator.span_id = value.span_id
        kind, start_ns = _KINDS[value.kind], _to_ns(epoch_s + value.started_at)
        span = self._tracer.start_span(
            value.name, scope, kind, value.attributes, start_time=start_ns
        )
        for name, moment in value.events:
            span.add_event(name, timestamp=_to_ns(epoch_s + moment))
        if value.fault:
            span.set_status(otel.Status(otel.StatusCode.ERROR, value.fault))
        span.end(_to_ns(epoch_s + value.ended_at))


class _PresetIdGenerator(IdGenerator):
    """Returns ids that were chosen before, because engines already received them."""

    trace_id = span_id = 0

    def generate_trace_id(self) -> int:
        """The trace id of the request that is being exported."""
        return self.trace_id

    def generate_span_id(self) -> int:
        """The id of the span that is being built."""
        return self.span_id


class _CountingExporter(SpanExporter):
    """Counts what another exporter sends, and logs failures rarely. Runs in the SDK's thread."""

    def __init__(self, exporter: SpanExporter, counts: dict[str, int]) -> None:
        self._exporter = exporter
        self._counts = counts
        self._warned_at = -WARNING_INTERVAL_S
        self._num_lost = 0
        self.num_done = 0
        """Spans that were sent or lost."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch."""
        try:
            result = self._exporter.export(spans)
        except Exception:  # noqa: BLE001 - tracing must not stop requests
            result = SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            self.num_done += len(spans)
            self._counts["exported"] += len(spans)
        else:
            self.record_lost(len(spans))
        return result

    def record_lost(self, num_spans: int) -> None:
        """Count spans that could not be sent."""
        self.num_done += num_spans
        self._counts["failed"] += num_spans
        self._num_lost += num_spans
        now = time.monotonic()
        if now - self._warned_at >= WARNING_INTERVAL_S:
            log.warning("traces cannot be exported: %d spans are lost", self._num_lost)
            self._warned_at, self._num_lost = now, 0

    def shutdown(self) -> None:
        """Close the connection."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is buffered here."""
        del timeout_millis
        return True


def _make_exporter(endpoint: str) -> SpanExporter:
    """gRPC by default, as in vLLM, or what OpenTelemetry's environment variable selects."""
    if endpoint and not _is_url(endpoint):
        need = "must be a URL such as http://HOST:4317"
        raise TracingError(f"--otlp-endpoint {need} (got {endpoint!r})")
    names = variables.OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, variables.OTEL_EXPORTER_OTLP_PROTOCOL
    protocol = os.environ.get(names[0]) or os.environ.get(names[1], "grpc")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc(endpoint or None)
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

        bare = endpoint and urlsplit(endpoint).path in ("", "/")
        return Http(f"{endpoint.rstrip('/')}/v1/traces" if bare else endpoint or None)
    raise TracingError(f"{names[1]} must be grpc or http/protobuf (got {protocol!r})")


def _is_url(endpoint: str) -> bool:
    try:
        parts = urlsplit(endpoint)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _describe_process() -> Resource:
    name = os.environ.get(variables.OTEL_SERVICE_NAME) or "cleave-gateway"
    instance = f"{socket.gethostname()}-{os.getpid()}"
    return Resource.create({"service.name": name, "service.instance.id": instance})


def _to_ns(seconds: float) -> int:
    return int(seconds * 1_000_000_000)
