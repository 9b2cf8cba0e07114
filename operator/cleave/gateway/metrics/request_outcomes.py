"""Counts a finished request in the metrics. Called by proxied requests.

What is hard: attainment that omits refused and lost requests would look too good, so a request
without a response counts as one that missed its targets, unless the client cancelled it or sent it
wrong.
"""

from cleave.gateway.metrics.gateway_metrics import GatewayMetrics
from cleave.router.router import Pick

ITL_SAMPLE_MASK = 7
"""The gaps of one stream in eight are timed: timing all of them would cost 4 % per token."""

_UNSERVED = frozenset(("shed", "unavailable", "failed", "broken"))


def record_completed(
    metrics: GatewayMetrics,
    model: str,
    tenant: str,
    outcome: str,
    prompt_tokens: int,
    output_tokens: int,
    stream_s: tuple[float, float] | None,
    pick: Pick | None = None,
) -> None:
    """Count a finished request.
    `model` is empty if it is unknown to the fleet, `tenant` without tenants. `stream_s`: for a
    stream, seconds to the first byte and from there to the end. `pick`: the instances, if known."""
    metrics.requests[model, outcome] += 1
    if tenant:
        metrics.tenants[tenant, outcome] += 1
        metrics.tenant_tokens[tenant] += prompt_tokens + output_tokens
    if not model:
        return
    counted = metrics.models[model]
    counted.prompt_tokens += prompt_tokens
    counted.output_tokens += output_tokens
    if output_tokens:
        counted.prompt_lengths.observe(prompt_tokens)
        counted.output_lengths.observe(output_tokens)
    tpot_s = 0.0
    if stream_s is not None:
        counted.ttft[(pick.prefill or pick.decode).role if pick else ""].observe(stream_s[0])
        if output_tokens > 1:
            tpot_s = stream_s[1] / (output_tokens - 1)
            counted.tpot[pick.decode.role if pick else ""].observe(tpot_s)
    slo = metrics.slo
    if slo is None:
        return
    if outcome in _UNSERVED:
        metrics.slo_results[model, "unserved"] += 1
    elif stream_s is not None:
        late, slow = stream_s[0] > slo.ttft_s, 0 < slo.tpot_s < tpot_s
        missed = ("ttft_and_tpot" if slow else "ttft") if late else "tpot" if slow else ""
        metrics.slo_results[model, missed] += 1
