"""W3C trace context: the trace of a request, and whether it is sampled. Pure.

Used for every request of a gateway that traces. A valid `traceparent` decides; without one the
trace id decides, as in OpenTelemetry's TraceIdRatioBased, so that gateways and engines agree
without communicating.
"""

import random
import re
from dataclasses import dataclass

from cleave.gateway.http.headers import TRACEPARENT

_PATTERN = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_RATIO_BITS = 64


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The trace of one request."""

    trace_id: int
    parent_id: int
    """The client's span; 0: the trace begins here."""
    sampled: bool

    def format_header(self, span_id: int) -> bytes:
        """The `traceparent` header line for requests made within this span."""
        return b"%b: 00-%032x-%016x-%02x\r\n" % (TRACEPARENT, self.trace_id, span_id, self.sampled)


def read_trace_context(header: bytes | None, share: float) -> TraceContext:
    """The trace of a request with this `traceparent` header; a new one if it is missing or invalid.
    `share`: of new traces that are sampled, 0..1."""
    match = _PATTERN.fullmatch(header) if header else None
    if match is not None:
        version, trace_id, parent_id = match[1], int(match[2], 16), int(match[3], 16)
        well_formed = version != b"ff" and (version != b"00" or match[5] is None)
        if well_formed and trace_id and parent_id:
            return TraceContext(trace_id, parent_id, bool(int(match[4], 16) & _SAMPLED))
    trace_id = random.getrandbits(128) or 1
    low_bits = trace_id & ((1 << _RATIO_BITS) - 1)
    return TraceContext(trace_id, 0, low_bits < share * (1 << _RATIO_BITS))


def make_span_id() -> int:
    """A random id other than zero."""
    return random.getrandbits(64) or 1
