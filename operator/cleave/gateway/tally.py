"""What one request adds to the metrics. Kept by its exchange, which says what happens when.

What is hard: an attainment that leaves out what was refused or lost flatters, so a request that got
no answer counts as one that missed its targets; only what clients broke off or got wrong does not.
"""

from cleave.gateway.metrics import Metrics, ModelMetrics
from cleave.gateway.relay import Relay

_UNSERVED = frozenset(("shed", "unavailable", "failed", "broken"))
TIMED_SHARE = 8
"""One stream in so many has each of its gaps timed: all of them would cost 4 % of a token."""


class Tally:
    """One request."""

    __slots__ = ("_gap_from", "_metrics", "model", "output_tokens", "prompt_tokens", "timed")

    def __init__(self, metrics: Metrics, model: str) -> None:
        self.model = model
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.timed = False
        """Whether `note_piece` is to be called."""
        self._metrics = metrics
        self._gap_from = 0.0

    @property
    def _counted(self) -> ModelMetrics:
        return self._metrics.models[self.model]

    def begin(self, phase: str, sent_at: float, now: float) -> None:
        """The first bytes of the stream; `phase`: decode, or whole when that includes prefill."""
        counted = self._counted
        counted.phases[phase].observe(now - sent_at)
        counted.streams += 1
        self.timed = counted.streams % TIMED_SHARE == 0

    def note_piece(self, now: float) -> None:
        """Some of a stream whose gaps are timed."""
        if self._gap_from:
            self._counted.itl.observe(now - self._gap_from)
        self._gap_from = now

    def end_stream(self, relay: Relay, started: float, now: float, complete: bool) -> None:
        """A stream is over."""
        counted = self._counted
        ttft_s = relay.began_at - started
        counted.ttft.observe(ttft_s)
        tpot_s = 0.0
        if relay.events > 1:
            tpot_s = (now - relay.began_at) / (relay.events - 1)
            counted.tpot.observe(tpot_s)
        slo = self._metrics.slo
        if slo is not None and complete:
            late, slow = ttft_s > slo.ttft_s, 0 < slo.tpot_s < tpot_s
            result = ("ttft_and_tpot" if slow else "ttft") if late else "tpot" if slow else ""
            self._result(result)

    def end(self, model: str, tenant: str, outcome: str) -> None:
        """All is over; `model` is empty when clients made it up."""
        metrics = self._metrics
        metrics.requests[model, outcome] += 1
        if tenant:
            metrics.tenants[tenant, outcome] += 1
            metrics.tenant_tokens[tenant] += self.prompt_tokens + self.output_tokens
        if model:
            counted = metrics.models[model]
            counted.prompt_tokens += self.prompt_tokens
            counted.output_tokens += self.output_tokens
            if metrics.slo is not None and outcome in _UNSERVED:
                self._result("unserved")

    def _result(self, missed: str) -> None:
        self._metrics.attained[self.model, missed] += 1
