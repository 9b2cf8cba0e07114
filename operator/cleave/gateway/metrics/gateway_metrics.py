"""Metrics of a gateway: plain numbers on the hot path, converted to Prometheus metrics at a scrape.

Objects of prometheus_client take 1-2 us per observation, and there are several per request; these
take a tenth. All times are seconds, as is usual in Prometheus.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from cleave.policy.reuse_times import BOUNDS_S, ReuseTimes
from cleave.router.router import Pick

LabelValues = TypeVar("LabelValues", bound=str | tuple[str, ...])

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
_UNSERVED = ("shed", "unavailable", "failed", "broken")
"""Outcomes of requests that nothing has served."""
_MISSED = ("", "ttft", "tpot", "ttft_and_tpot", "unserved")
_RECOVERIES = ("continued", "replayed")
_FLIPS = (
    ("prefill", "mixed"), ("mixed", "prefill"), ("decode", "mixed"), ("mixed", "decode"),
)  # fmt: skip
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

    def add_to(self, family: HistogramMetricFamily, labels: list[str]) -> None:
        """Add these values to a metric family of a scrape."""
        bounds = *map(str, self._bounds), "+Inf"
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        family.add_metric(labels, buckets, self._sum)


def _make_role_histograms(bounds: tuple[float, ...]) -> dict[str, BucketHistogram]:
    return defaultdict(lambda: BucketHistogram(bounds))


@dataclass(frozen=True, slots=True)
class SloTargets:
    """Targets for responses, in seconds."""

    ttft_s: float
    tpot_s: float
    """0: no target."""


class ModelMetrics:
    """Metrics of one model."""

    __slots__ = (
        "handoff_tokens", "itl", "output_lengths", "output_tokens", "phases", "prompt_lengths",
        "prompt_tokens", "queue", "tpot", "ttft",
    )  # fmt: skip

    def __init__(self) -> None:
        self.ttft = _make_role_histograms(TTFT_BOUNDS_S)
        """By the role of the instance that computed the prompt."""
        self.tpot = _make_role_histograms(TPOT_BOUNDS_S)
        """By the role of the instance that generated the tokens; as `itl`."""
        self.itl = _make_role_histograms(TPOT_BOUNDS_S)
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
        "ahead_from_tokens", "audits", "canaries", "canary_seconds", "dispatches",
        "flex_in_flight", "flex_requests", "flex_tokens", "flex_waiting", "flips", "handoffs",
        "in_flight", "keys_stale", "models", "processes", "recoveries", "rejections", "requests",
        "restarts", "retries", "retries_delayed", "reuse_times", "slo", "slo_results", "spans",
        "streams", "suspects", "tenant_tokens", "tenants", "waiting", "whole_below_tokens",
    )  # fmt: skip

    def __init__(self, slo: SloTargets | None = None) -> None:
        """`slo`: None when responses are not measured against targets."""
        self.slo = slo
        self.models: dict[str, ModelMetrics] = defaultdict(ModelMetrics)
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
        tokens, bytes, slow, refused; audit: wrong in the handoff of a request."""
        self.canary_seconds: dict[str, float] = defaultdict(float)
        """Time of engines that canaries took, by phase."""
        self.audits: dict[str, int] = defaultdict(int)
        """Handoffs of requests that were computed again as a whole, by result: same, near_tie,
        different, skipped (engines were busy, or failed)."""
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
        self.streams = 0
        """Streams begun so far."""
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
    if outcome in _UNSERVED:
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


class GatewayCollector:
    """Converts the counts to metric families; registered with prometheus_client.

    What is hard: Prometheus computes no rate from the first sample of a series, so a counter that
    appears with 1 and stays there has counted nothing for panels and alerts. So those of rare
    events are exported with zeros before.
    """

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """Called at each scrape."""
        total = self._metrics
        requests = self._add_zeros(total.requests, _UNSERVED)
        yield _build_counter("requests", "Requests by outcome", requests, "model", "outcome")
        text = "Requests of the tier flex by outcome, counted nowhere else"
        yield _build_counter("flex_requests", text, total.flex_requests, "model", "outcome")
        text = "Prompt and output tokens of the tier flex"
        yield _build_counter("flex_tokens", text, total.flex_tokens, "model")
        yield _build_counter("shed", "Requests not taken", total.rejections, "tenant", "reason")
        yield _build_counter("tenant_requests", "Requests", total.tenants, "tenant", "outcome")
        tokens = total.tenant_tokens
        yield _build_counter("tenant_tokens", "Of prompts and answers", tokens, "tenant")
        yield _build_counter("dispatches", "Picks by reason", total.dispatches, "model", "reason")
        retries = dict.fromkeys(((phase, cause) for phase in PHASES for cause in RETRY_CAUSES), 0)
        retries |= total.retries
        yield _build_counter("retries", "Failed attempts by cause", retries, "phase", "cause")
        delayed, suspects = total.retries_delayed, dict.fromkeys(total.models, 0) | total.suspects
        yield _build_counter("retries_delayed", "Retries that waited", delayed, "model")
        yield _build_counter("suspects", "Requests that ended two engines", suspects, "model")
        recovered = "Streams that another engine went on with"
        recoveries = self._add_zeros(total.recoveries, _RECOVERIES)
        yield _build_counter("recoveries", recovered, recoveries, "model", "how")
        yield from self._collect_attainment()
        handoffs = dict.fromkeys(("used", "failed", "refused"), 0) | total.handoffs
        yield _build_counter("handoffs", "KV handoffs by result", handoffs, "result")
        canaries = {"good": 0} | total.canaries
        yield _build_counter("kv_canaries", "Canary handoffs by result", canaries, "result")
        name, text = "kv_canary_seconds", "Time of engines that canary handoffs took"
        seconds = CounterMetricFamily(f"cleave_gateway_{name}", text, labels=["phase"])
        for phase, spent_s in total.canary_seconds.items():
            seconds.add_metric([phase], spent_s)
        yield seconds
        audited = "Handoffs of requests that were computed again, by result"
        audits = dict.fromkeys(("same", "different"), 0) | total.audits
        yield _build_counter("kv_audits", audited, audits, "result")
        flips = dict.fromkeys(((model, *roles) for model in total.models for roles in _FLIPS), 0)
        flips |= total.flips
        yield _build_counter("flips", "Changes of roles", flips, "model", "from", "to")
        yield _build_counter("spans", "Spans of traces by result", total.spans, "result")
        for name, text, value in (
            ("requests_in_flight", "Requests being served", total.in_flight),
            ("requests_waiting", "Of these, waiting for a turn", total.waiting),
            ("flex_in_flight", "Requests of the tier flex that run or wait", total.flex_in_flight),
            ("flex_waiting", "Of these, waiting for idle capacity", total.flex_waiting),
            ("keys_stale", "1: the previous API keys are in use", total.keys_stale),
            ("processes", "Processes that serve", total.processes),
        ):
            yield GaugeMetricFamily(f"cleave_gateway_{name}", text, value)
        thresholds = GaugeMetricFamily(
            "cleave_gateway_plan_threshold_tokens",
            "Prompt lengths from the plan that this gateway applies; 0: none",
            labels=["threshold"],
        )
        thresholds.add_metric(["whole_below"], total.whole_below_tokens)
        thresholds.add_metric(["ahead_from"], total.ahead_from_tokens)
        yield thresholds
        yield CounterMetricFamily(
            "cleave_gateway_process_restarts", "Processes that were replaced", total.restarts
        )
        yield from self._collect_models()
        yield self._collect_reuse_times()

    def _add_zeros(
        self, counted: Mapping[tuple[str, str], int], values: Iterable[str]
    ) -> Mapping[tuple[str, str], int]:
        """The counts, and zeros for the values that a model does not have yet."""
        zeros = dict.fromkeys(
            ((model, each) for model in self._metrics.models for each in values), 0
        )
        return zeros | dict(counted)

    def _collect_models(self) -> Iterable[Metric]:
        models = self._metrics.models.items()
        for key, text in (
            ("prompt_tokens", "Prompt tokens, estimated if the engine reports none"),
            ("output_tokens", "Tokens sent to clients"),
            ("handoff_tokens", "Prompt tokens whose KV was handed over"),
        ):
            tokens = {name: getattr(model, key) for name, model in models}
            yield _build_counter(key, text, tokens, "model")
        by_role = "model", "role"
        ttft = _build_histogram("ttft", "Request read to first byte of stream", *by_role)
        tpot = _build_histogram("tpot", "Mean time between tokens of a stream", *by_role)
        itl = _build_histogram("itl", "Each gap between pieces of some streams", *by_role)
        text = "Wait for a turn, where tenants or targets have limits"
        queue = _build_histogram("queue", text, "model")
        text = "Sending to an instance to its first bytes, of split requests"
        phases = _build_histogram("phase", text, "model", "phase")
        prompts = _build_length_histogram("prompt", "Prompt tokens of a request that was answered")
        outputs = _build_length_histogram("output", "Tokens of the answer to a request")
        for name, model in models:
            model.prompt_lengths.add_to(prompts, [name])
            model.output_lengths.add_to(outputs, [name])
            for family, roles in ((ttft, model.ttft), (tpot, model.tpot), (itl, model.itl)):
                for role, histogram in roles.items():
                    histogram.add_to(family, [name, role])
            model.queue.add_to(queue, [name])
            for phase, histogram in model.phases.items():
                histogram.add_to(phases, [name, phase])
        yield from (ttft, tpot, itl, queue, phases, prompts, outputs)

    def _collect_reuse_times(self) -> Metric:
        """Tokens take the place of observations. There is no sum: new tokens have no time."""
        text = "Prompt tokens by the time since an earlier prompt began alike; +Inf: new ones"
        family = _build_histogram("prompt_reuse", text, "model")
        bounds = *map(str, BOUNDS_S), "+Inf"
        for model, times in self._metrics.reuse_times.items():
            counts = accumulate(times.to_list())
            family.add_metric([model], list(zip(bounds, counts, strict=True)), None)
        return family

    def _collect_attainment(self) -> Iterable[Metric]:
        """Goodput is the rate of requests that missed no target."""
        counted = self._metrics
        # Not those of models whose responses are not measured, as no attainment is not 0.
        models = {model for model, _ in counted.slo_results}
        attained = dict.fromkeys(((model, missed) for model in models for missed in _MISSED), 0)
        attained |= counted.slo_results
        yield _build_counter("slo", "Answers by what they missed", attained, "model", "missed")
        target = GaugeMetricFamily(
            "cleave_gateway_slo_target_seconds", "What answers are measured against", labels=["slo"]
        )
        if counted.slo is not None:
            target.add_metric(["ttft"], counted.slo.ttft_s)
            target.add_metric(["tpot"], counted.slo.tpot_s)
        yield target


def _build_histogram(name: str, text: str, *labels: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(f"cleave_gateway_{name}_seconds", text, labels=labels)


def _build_length_histogram(of: str, text: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(f"cleave_gateway_request_{of}_tokens", text, labels=["model"])


def _build_counter(
    name: str, text: str, values: Mapping[LabelValues, int], *labels: str
) -> CounterMetricFamily:
    family = CounterMetricFamily(f"cleave_gateway_{name}", text, labels=labels)
    for key, value in values.items():
        family.add_metric([key] if isinstance(key, str) else list(key), value)
    return family
