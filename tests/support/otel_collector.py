"""An in-process OpenTelemetry collector that stores the spans of gateways."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

ERROR = Status.STATUS_CODE_ERROR


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resource: dict[str, str] = {}

    def Export(self, request, context=None):  # noqa: N802 - gRPC's own
        for part in request.resource_spans:
            self.resource = {a.key: a.value.string_value for a in part.resource.attributes}
            for scope in part.scope_spans:
                self.spans.extend(scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()

    def find(self, name: str) -> list[Span]:
        """Spans with this name, by start time."""
        found = [span for span in self.spans if span.name == name]
        return sorted(found, key=lambda span: span.start_time_unix_nano)

    def find_parents(self, name: str) -> list[str]:
        """Return the names of the parents of all spans of this name."""
        names = {span.span_id: span.name for span in self.spans}
        return sorted(names.get(span.parent_span_id, "") for span in self.find(name))

    def only(self, name: str) -> Span:
        (span,) = self.find(name)
        return span

    def children(self, parent: Span) -> list[str]:
        """Names of the child spans, by start time."""
        found = [span for span in self.spans if span.parent_span_id == parent.span_id]
        return [each.name for each in sorted(found, key=lambda span: span.start_time_unix_nano)]


def read(span: Span) -> dict[str, object]:
    """The attributes of a span."""
    kinds = ((a.key, a.value, a.value.WhichOneof("value")) for a in span.attributes)
    return {key: getattr(value, kind) for key, value, kind in kinds}


@contextlib.contextmanager
def serve_grpc() -> Iterator[tuple[Collector, str]]:
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


@contextlib.contextmanager
def serve_http() -> Iterator[tuple[Collector, str]]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            request = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
            answer = collector.Export(request).SerializeToString()
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield collector, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
