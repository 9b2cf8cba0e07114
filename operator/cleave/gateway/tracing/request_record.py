"""The record of one request, filled while it runs, for its trace and its line in the access log.

Filled by `recording_observer`, read by `spans` and `access_log` when the request has finished. No
I/O, and no content of the request: only names, counts and times, in seconds of the gateway's clock.
"""

from dataclasses import dataclass, field
from typing import Protocol

from cleave.gateway.tracing.traceparent import TraceContext, make_span_id
from cleave.router.instance import Target
from cleave.router.router import Pick


@dataclass(slots=True)
class CallRecord:
    """One call to one instance."""

    phase: str
    """prefill, decode, or whole for both."""
    target: Target
    sent_at: float
    first_byte_at: float = 0.0
    """When its stream began; 0: it did not."""
    ended_at: float = 0.0
    fault: str = ""
    """The Failure; empty: none."""
    blocks: int = 0
    """KV blocks that it handed over."""
    span_id: int = field(default_factory=make_span_id)


@dataclass(slots=True)
class AttemptRecord:
    """One attempt: the picked instances and the calls to them."""

    pick: Pick
    recovery_mode: str
    """Of a retry: again, continued or replayed; empty for the first attempt."""
    started_at: float
    ended_at: float = 0.0
    fault: str = ""
    instance: str = ""
    """The instance that failed."""
    reason: str = ""
    """What that instance did; continues `instance NAME ...`."""
    calls: list[CallRecord] = field(default_factory=list)
    span_id: int = field(default_factory=make_span_id)

    def end(self, now: float) -> None:
        """Set the end times that are not set."""
        self.ended_at = self.ended_at or now
        for call in self.calls:
            call.ended_at = call.ended_at or now


@dataclass(slots=True)
class RequestRecord:
    """One request."""

    request_id: str
    method: str
    path: str
    model: str
    """Empty if no instance has ever served it."""
    started_at: float
    tenant: str = ""
    stream: bool = False
    trace: TraceContext | None = None
    """None: not traced."""
    secure: bool = False
    """Whether it came over TLS."""
    attempts: list[AttemptRecord] = field(default_factory=list)
    first_byte_at: float = 0.0
    """When the stream to the client began; 0: it did not."""
    ended_at: float = 0.0
    status: int = 0
    """Of the response; 0: there was none."""
    error: str = ""
    """Code of the error, or its type if it has no code."""
    outcome: str = ""
    """As in the metric of requests."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    max_tokens: int = 0
    """As requested by the client; 0: no limit."""
    span_id: int = field(default_factory=make_span_id)

    def fail(self, instance: str, fault: str, reason: str, now: float) -> None:
        """Record that an instance failed the last attempt: either one of two concurrent calls."""
        attempt = self.attempts[-1]
        attempt.instance, attempt.fault, attempt.reason = instance, fault, reason
        for call in attempt.calls:
            if call.target.instance == instance:
                call.fault = fault
        attempt.end(now)

    def end(self, outcome: str, now: float) -> None:
        """The request has finished."""
        self.outcome, self.ended_at = outcome, now
        if self.attempts:
            self.attempts[-1].end(now)


class TracingError(ValueError):
    """Tracing cannot work as configured."""


class RequestListener(Protocol):
    """Receives the records of finished requests."""

    def on_finished(self, record: RequestRecord) -> None:
        """A request has finished."""
