"""What a request adds to the metrics when it is over. Called by exchanges.

What is hard: an attainment that leaves out what was refused or lost flatters, so a request that got
no answer counts as one that missed its targets; only what clients broke off or got wrong does not.
"""

from cleave.gateway.metrics import Metrics
from cleave.gateway.relay import Relay

TIMED_MASK = 7
"""One stream in eight has each of its gaps timed: all of them would cost 4 % of a token."""

_UNSERVED = frozenset(("shed", "unavailable", "failed", "broken"))


def count_stream(
    metrics: Metrics, model: str, relay: Relay, started: float, now: float, complete: bool
) -> None:
    """A stream is over. Times in seconds."""
    counted = metrics.models[model]
    ttft_s, events = relay.began_at - started, relay.events
    counted.ttft.observe(ttft_s)
    tpot_s = 0.0
    if events > 1:
        tpot_s = (now - relay.began_at) / (events - 1)
        counted.tpot.observe(tpot_s)
    slo = metrics.slo
    if slo is not None and complete:
        late, slow = ttft_s > slo.ttft_s, 0 < slo.tpot_s < tpot_s
        missed = ("ttft_and_tpot" if slow else "ttft") if late else "tpot" if slow else ""
        metrics.attained[model, missed] += 1


def count_end(
    metrics: Metrics,
    model: str,
    tenant: str,
    outcome: str,
    prompt_tokens: int,
    output_tokens: int,
) -> None:
    """All is over; `model` is empty when clients made it up, `tenant` where there are none."""
    metrics.requests[model, outcome] += 1
    if tenant:
        metrics.tenants[tenant, outcome] += 1
        metrics.tenant_tokens[tenant] += prompt_tokens + output_tokens
    if model:
        counted = metrics.models[model]
        counted.prompt_tokens += prompt_tokens
        counted.output_tokens += output_tokens
        if metrics.slo is not None and outcome in _UNSERVED:
            metrics.attained[model, "unserved"] += 1
