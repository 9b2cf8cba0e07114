"""Metrics of a gateway: plain numbers on the hot path, which `gateway_families` writes at a scrape.

Objects of prometheus_client take 1-2 us per observation, and there are several per request; these
take a tenth. All times are seconds, as is usual in Prometheus.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from cleave.policy.reuse_times import ReuseTimes
from cleave.router.router import Pick

TTFT_BOUNDS_S = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
TPOT_BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0,
)  # fmt: skip
LENGTH_BOUNDS = tuple(float(round(2 ** (step / 2))) for step in range(4, 37))
"""Tokens. Means are exact whatever the widths of buckets, quantiles only if they are narrow."""

PHASES = ("prefill", "decode")
"""Of split requests; for others the TTFT is enough."""

ITL_SAMPLE_MASK = 7
"""The gaps of one stream in eight are timed: timing all of them would cost 4 % per token."""
UNSERVED = ("shed", "unavailable", "failed", "broken")
"""Outcomes of requests that nothing has served."""
RETRY_CAUSES = (
    "lost", "unreached", "timeout", "status", "handoff", "stall", "adapter", "too_long",
)  # fmt: skip
"""The values of `failover.retry_policy.Failure`, which this module must not import."""


class BucketHistogram:
    """Counts per bucket, and the sum of all values."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def to_list(self) -> list[float]:
        """Counts, then the sum; the form that `merge` takes."""
        return [*self._counts, self._sum]

    def merge(self, other: Sequence[float]) -> None:
        """Add the counts of another histogram with the same bounds."""
        *counts, total = other
        self._counts = [int(a + b) for a, b in zip(self._counts, counts, strict=True)]
        self._sum += total


def _make_role_histograms(bounds: tuple[float, ...]) -> dict[str, BucketHistogram]:
    return defaultdict(lambda: BucketHistogram(bounds))


@dataclass(frozen=True, slots=True)
class SloTargets:
    """Targets for responses, in seconds."""

    ttft_s: float
    tpot_s: float
    """0: no target; so is `itl_p99_s`, of all gaps between pieces together."""
    itl_p99_s: float = 0.0

    @property
    def itl_bounds_s(self) -> tuple[float, ...]:
        """The target is one of them, so that the share of gaps within it is exact, and not the
        last: a quantile above all of them would be taken for it."""
        beyond = 2 * self.itl_p99_s if self.itl_p99_s >= TPOT_BOUNDS_S[-1] else 0.0
        return tuple(sorted({*TPOT_BOUNDS_S, self.itl_p99_s, beyond} - {0.0}))


class ModelMetrics:
    """Metrics of one model."""

    __slots__ = (
        "handoff_tokens", "itl", "output_lengths", "output_tokens", "phases", "prompt_lengths",
        "prompt_tokens", "queue", "tpot", "ttft",
    )  # fmt: skip

    def __init__(self, itl_bounds_s: tuple[float, ...] = TPOT_BOUNDS_S) -> None:
        self.ttft = _make_role_histograms(TTFT_BOUNDS_S)
        """By the role of the instance that computed the prompt."""
        self.tpot = _make_role_histograms(TPOT_BOUNDS_S)
        """By the role of the instance that generated the tokens; as `itl`."""
        self.itl = _make_role_histograms(itl_bounds_s)
        self.queue = BucketHistogram(TTFT_BOUNDS_S)
        """Wait for admission of requests that needed it."""
        self.phases = {phase: BucketHistogram(TTFT_BOUNDS_S) for phase in PHASES}
        """By phase, from sending the request to the instance to its first bytes."""
        self.prompt_lengths = BucketHistogram(LENGTH_BOUNDS)
        """Of requests that got tokens; so is `output_lengths`."""
        self.output_lengths = BucketHistogram(LENGTH_BOUNDS)
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.handoff_tokens = 0
        """Of prompts whose KV was handed over to another instance."""


class GatewayMetrics:
    """Everything one gateway process has counted since its start."""

    __slots__ = (
        "ahead_from_tokens", "canaries", "canary_seconds", "certificate_expiries",
        "dispatches", "flex_in_flight", "flex_requests", "flex_tokens", "flex_waiting", "flips",
        "handoffs", "in_flight", "itl_bounds_s", "keys_stale", "models", "processes", "recoveries",
        "rejections", "requests", "restarts", "retries", "retries_delayed", "reuse_times", "slo",
        "slo_results", "spans", "streams", "streams_not_kept", "suspects", "tenant_tokens",
        "tenants", "waiting", "whole_below_tokens",
    )  # fmt: skip

    def __init__(self, slo: SloTargets | None = None) -> None:
        """`slo`: None when responses are not measured against targets."""
        self.slo = slo
        self.itl_bounds_s = slo.itl_bounds_s if slo else TPOT_BOUNDS_S
        self.models: dict[str, ModelMetrics] = defaultdict(partial(ModelMetrics, self.itl_bounds_s))
        """By model that has had instances, so that clients cannot create label values."""
        self.requests: dict[tuple[str, str], int] = defaultdict(int)
        """By model and outcome; the model is empty for names that no instance has ever served.

        ok; refused: the client's fault; shed: refused by admission, see `rejections`; unavailable:
        no instance; failed: engines failed; broken: they failed in mid-stream; cancelled: the
        client disconnected.
        """
        self.flex_requests: dict[tuple[str, str], int] = defaultdict(int)
        """The same of requests with `service_tier: flex`, which count nowhere else: what only fills
        idle capacity must neither add instances nor count as a missed target."""
        self.flex_tokens: dict[str, int] = defaultdict(int)
        """Of their prompts and outputs, by model."""
        self.flex_in_flight = 0
        """Of them, those that run or wait; updated by the sweeper, as the next one."""
        self.flex_waiting = 0
        self.slo_results: dict[tuple[str, str], int] = defaultdict(int)
        """By model and missed target: none (empty), ttft, tpot, ttft_and_tpot, unserved."""
        self.rejections: dict[tuple[str, str], int] = defaultdict(int)
        """By tenant and reason."""
        self.tenants: dict[tuple[str, str], int] = defaultdict(int)
        """Requests by tenant and outcome."""
        self.tenant_tokens: dict[str, int] = defaultdict(int)
        """Of prompts and outputs."""
        self.dispatches: dict[tuple[str, str], int] = defaultdict(int)
        """By model and the reason of the router's pick."""
        self.retries: dict[tuple[str, str], int] = defaultdict(int)
        """By phase that failed, and cause."""
        self.reuse_times: dict[str, ReuseTimes] = defaultdict(ReuseTimes)
        """By model; the router counts them."""
        self.retries_delayed: dict[str, int] = defaultdict(int)
        """Retries that waited for their model's retry budget, by model."""
        self.suspects: dict[str, int] = defaultdict(int)
        """Requests that two engines ended with, by model."""
        self.recoveries: dict[tuple[str, str], int] = defaultdict(int)
        """Streams that another engine continued, by model and mode: continued, replayed."""
        self.handoffs: dict[str, int] = defaultdict(int)
        """By result: used, failed (used, then an error), none (nothing to hand over), refused (of
        another boot or request, or unreadable), ahead (after the decode engine had responded)."""
        self.canaries: dict[str, int] = defaultdict(int)
        """Canary handoffs by result: good, near_tie, blurred (shows nothing), or what was wrong:
        tokens, bytes, slow, refused; reported: found by another process."""
        self.canary_seconds: dict[str, float] = defaultdict(float)
        """Time of engines that canaries took, by phase."""
        self.spans: dict[str, int] = defaultdict(int)
        """Of traces, by result: exported, failed, dropped. Empty without tracing."""
        self.processes = 1
        """Processes that serve; with several, these metrics are their sum."""
        self.restarts = 0
        """Restarts of processes that died."""
        self.flips: dict[tuple[str, str, str], int] = defaultdict(int)
        """By model, old and new role; those that were only advised are included."""
        self.in_flight = 0
        self.waiting = 0
        """Of these, requests queued for admission; updated by the sweeper."""
        self.keys_stale = 0
        """1: the changed file of API keys cannot be read, and the previous keys are in use."""
        self.certificate_expiries: dict[str, float] = {}
        """Unix time when the certificate in use expires, by port."""
        self.streams = 0
        """Streams begun so far."""
        self.streams_not_kept = 0
        """Streams of which there was no memory to keep what another engine needs to continue."""
        self.whole_below_tokens = 0
        """Thresholds of the plan that are in force, set by the context; 0: none."""
        self.ahead_from_tokens = 0


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
    """Count a finished request. What is hard: attainment that omits refused and lost requests would
    look too good, so a request without a response counts as one that missed its targets, unless the
    client cancelled it or sent it wrong.

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
    if outcome in UNSERVED:
        metrics.slo_results[model, "unserved"] += 1
    elif stream_s is not None:
        late, slow = stream_s[0] > slo.ttft_s, 0 < slo.tpot_s < tpot_s
        missed = ("ttft_and_tpot" if slow else "ttft") if late else "tpot" if slow else ""
        metrics.slo_results[model, missed] += 1


def record_flex(
    metrics: GatewayMetrics,
    model: str,
    tenant: str,
    outcome: str,
    prompt_tokens: int,
    output_tokens: int,
) -> None:
    """Count a finished request of the tier flex; the arguments are those of `record_completed`."""
    metrics.flex_requests[model, outcome] += 1
    if tenant:
        metrics.tenants[tenant, outcome] += 1
        metrics.tenant_tokens[tenant] += prompt_tokens + output_tokens
    if model:
        metrics.flex_tokens[model] += prompt_tokens + output_tokens
