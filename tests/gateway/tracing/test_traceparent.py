"""W3C trace context: who decides on sampling, and what engines get."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.gateway.tracing.traceparent import TraceContext, make_span_id, read_trace_context

IDS = st.integers(1, (1 << 64) - 1)
TRACE_IDS = st.integers(1, (1 << 128) - 1)


@given(TRACE_IDS, IDS, st.booleans(), st.sampled_from([0.0, 1.0]))
def test_a_written_header_is_read_back_at_any_sample_ratio(trace_id, span_id, sampled, share):
    line = TraceContext(trace_id, 7, sampled).format_header(span_id)
    assert line.endswith(b"\r\n")
    header = line.removeprefix(b"traceparent: ").strip()
    assert read_trace_context(header, share) == TraceContext(trace_id, span_id, sampled)


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        b"nonsense",
        b"00-%032x-%016x-01" % (0, 1),
        b"00-%032x-%016x-01" % (1, 0),
        b"ff-%032x-%016x-01" % (1, 1),
        b"00-%032x-%016x-01-more" % (1, 1),
        b"00-%032X-%016X-01" % (0xAB, 0xAB),
        b"00-%032x-%016x-01\r\nx: y" % (1, 1),
        b"00-%032x-%016x-1" % (1, 1),
    ],
)
def test_a_trace_of_its_own_begins_where_the_header_is_none(header):
    context = read_trace_context(header, 1.0)
    assert (context.parent_id, context.sampled) == (0, True)
    assert context.trace_id != 1
    assert not read_trace_context(header, 0.0).sampled


def test_later_versions_of_the_header_are_read_as_far_as_they_are_known():
    header = b"01-%032x-%016x-03-more" % (5, 6)
    assert read_trace_context(header, 0.0) == TraceContext(5, 6, sampled=True)


def test_the_share_is_what_is_sampled():
    sampled = sum(read_trace_context(None, 0.25).sampled for _ in range(4_000))
    assert 800 < sampled < 1_200


def test_the_trace_id_decides_so_that_everybody_decides_alike():
    for _ in range(200):
        context = read_trace_context(None, 0.5)
        assert context.sampled == (context.trace_id & ((1 << 64) - 1) < 1 << 63)


def test_span_ids_are_never_zero_and_fit():
    assert all(0 < make_span_id() < 1 << 64 for _ in range(1_000))
