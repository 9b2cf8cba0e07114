"""What happened to one request, as it happens: for its trace and its line in the access log.

Kept by `watched` for requests that somebody wants to hear about, read by `spans` and `access_log`
when they are over. No I/O, and nothing of what a request says: names, counts and moments only.
All moments are seconds of the gateway's clock.
"""

from dataclasses import dataclass, field
from typing import Protocol

from cleave.gateway.stories.traceparent import TraceContext, make_span_id
from cleave.router.instance import Target
from cleave.router.router import Pick


@dataclass(slots=True)
class Leg:
    """One call to one instance."""

    phase: str
    """prefill, decode, or whole: both."""
    target: Target
    sent_at: float
    first_at: float = 0.0
    """When its stream began; 0: it did not."""
    ended_at: float = 0.0
    fault: str = ""
    """How it failed; empty: it did not."""
    blocks: int = 0
    """Of KV that it handed over."""
    span_id: int = field(default_factory=make_span_id)


@dataclass(slots=True)
class Try:
    """One attempt: the instances that were picked, and the calls to them."""

    pick: Pick
    way: str
    """Of a further one: again, continued or replayed; empty for the first."""
    began_at: float
    ended_at: float = 0.0
    fault: str = ""
    instance: str = ""
    """Whose fault it was."""
    reason: str = ""
    """What the instance did; continues `instance NAME ...`."""
    legs: list[Leg] = field(default_factory=list)
    span_id: int = field(default_factory=make_span_id)

    def end(self, now: float) -> None:
        """Whatever is left of it is over."""
        self.ended_at = self.ended_at or now
        for leg in self.legs:
            leg.ended_at = leg.ended_at or now


@dataclass(slots=True)
class Story:
    """One request."""

    request_id: str
    method: str
    path: str
    model: str
    """Empty: none that was ever served here."""
    started_at: float
    tenant: str = ""
    stream: bool = False
    trace: TraceContext | None = None
    """None: it is not traced."""
    secure: bool = False
    """Whether it came over TLS."""
    tries: list[Try] = field(default_factory=list)
    first_at: float = 0.0
    """When its stream began; 0: there was none."""
    ended_at: float = 0.0
    status: int = 0
    """Of the answer; 0: the client had none."""
    error: str = ""
    """Its code, or else its type."""
    outcome: str = ""
    """As in the metrics."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    max_tokens: int = 0
    """That the client asked for; 0: it has set no limit."""
    span_id: int = field(default_factory=make_span_id)

    def fail(self, instance: str, fault: str, reason: str, now: float) -> None:
        """An instance has let its last try down: of two legs at the same time it may be either."""
        told = self.tries[-1]
        told.instance, told.fault, told.reason = instance, fault, reason
        for leg in told.legs:
            if leg.target.instance == instance:
                leg.fault = fault
        told.end(now)

    def end(self, outcome: str, now: float) -> None:
        """It is over."""
        self.outcome, self.ended_at = outcome, now
        if self.tries:
            self.tries[-1].end(now)


class TracingError(ValueError):
    """Traces cannot be sent as they were asked for."""


class Listener(Protocol):
    """Who wants to hear."""

    def tell(self, story: Story) -> None:
        """A request is over."""
