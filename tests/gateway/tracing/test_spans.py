"""Spans of a request record, without a collector."""

import pytest

from cleave.gateway.tracing.request_record import RequestRecord
from cleave.gateway.tracing.spans import build_spans
from cleave.gateway.tracing.traceparent import TraceContext


@pytest.mark.parametrize(("secure", "scheme"), [(False, "http"), (True, "https")])
def test_a_span_has_the_scheme_of_the_client(secure: bool, scheme: str) -> None:
    trace = TraceContext(trace_id=1, parent_id=0, sampled=True)
    record = RequestRecord("r", "POST", "/v1/completions", "m", 1.0, trace=trace, secure=secure)
    record.end("ok", 2.0)
    (span,) = build_spans(record)
    assert span.attributes["url.scheme"] == scheme
