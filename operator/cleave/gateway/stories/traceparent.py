"""W3C trace context: which trace a request belongs to, and whether it is recorded. Pure.

Asked for every request of a gateway that traces. Who sends a valid `traceparent` has decided; for
all others the trace id itself decides, as OpenTelemetry's TraceIdRatioBased does, so that gateways
and engines agree without talking.
"""

import random
import re
from dataclasses import dataclass

from cleave.gateway.head import TRACEPARENT

_FORM = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_RATIO_BITS = 64


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The trace of one request."""

    trace_id: int
    parent_id: int
    """Span of the client; 0: the trace begins here."""
    sampled: bool

    def write(self, span_id: int) -> bytes:
        """The header line for what is called on behalf of this span."""
        return b"%b: 00-%032x-%016x-%02x\r\n" % (TRACEPARENT, self.trace_id, span_id, self.sampled)


def read_context(header: bytes | None, share: float) -> TraceContext:
    """The trace of a request with this `traceparent`; without a valid one, one of its own.

    `share`: of those that are recorded, 0..1.
    """
    told = _FORM.fullmatch(header) if header else None
    if told is not None:
        version, trace_id, parent_id = told[1], int(told[2], 16), int(told[3], 16)
        well_formed = version != b"ff" and (version != b"00" or told[5] is None)
        if well_formed and trace_id and parent_id:
            return TraceContext(trace_id, parent_id, bool(int(told[4], 16) & _SAMPLED))
    trace_id = random.getrandbits(128) or 1
    least_bits = trace_id & ((1 << _RATIO_BITS) - 1)
    return TraceContext(trace_id, 0, least_bits < share * (1 << _RATIO_BITS))


def make_span_id() -> int:
    """One that is not zero."""
    return random.getrandbits(64) or 1
