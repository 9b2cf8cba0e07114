"""The metric families of what a gateway has counted.

What is hard: Prometheus computes no rate from the first sample of a series, so a counter that
appears with 1 and stays there has counted nothing for panels and alerts. So those of rare events
are exported with zeros before.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cleave.gateway.metrics.families import (
    Family,
    Key,
    build_counter,
    build_gauge,
    build_histogram,
)
from cleave.gateway.metrics.gateway_metrics import (
    LENGTH_BOUNDS,
    PHASES,
    RETRY_CAUSES,
    TPOT_BOUNDS_S,
    TTFT_BOUNDS_S,
    UNSERVED,
    BucketHistogram,
    GatewayMetrics,
    ModelMetrics,
)
from cleave.policy.reuse_times import BOUNDS_S

_MISSED = ("", "ttft", "tpot", "ttft_and_tpot", "unserved")
_RECOVERIES = ("continued", "replayed")
_FLIPS = (
    ("prefill", "mixed"), ("mixed", "prefill"), ("decode", "mixed"), ("mixed", "decode"),
)  # fmt: skip

Row = tuple[Key, list[float], float | None]


def list_families(total: GatewayMetrics) -> Iterator[Family]:
    """All families of the counts of one process, or the sum over several."""
    yield from _list_requests(total)
    yield from _list_attainment(total)
    yield from _list_events(total)
    yield from _list_states(total)
    yield from _list_models(total)


def _list_requests(total: GatewayMetrics) -> Iterator[Family]:
    requests = _fill_zeros(total.requests, _pair(total.models, UNSERVED))
    yield _build_counter("requests", "Requests by outcome", requests, "model", "outcome")
    text = "Requests of the tier flex by outcome, counted nowhere else"
    yield _build_counter("flex_requests", text, _list(total.flex_requests), "model", "outcome")
    text = "Prompt and output tokens of the tier flex"
    yield _build_counter("flex_tokens", text, _list(total.flex_tokens), "model")
    yield _build_counter("shed", "Requests not taken", _list(total.rejections), "tenant", "reason")
    yield _build_counter("tenant_requests", "Requests", _list(total.tenants), "tenant", "outcome")
    tokens = _list(total.tenant_tokens)
    yield _build_counter("tenant_tokens", "Of prompts and answers", tokens, "tenant")
    yield _build_counter(
        "dispatches", "Picks by reason", _list(total.dispatches), "model", "reason"
    )
    retries = {(phase, cause): 0 for phase in PHASES for cause in RETRY_CAUSES} | total.retries
    yield _build_counter("retries", "Failed attempts by cause", _list(retries), "phase", "cause")
    delayed = _list(total.retries_delayed)
    yield _build_counter("retries_delayed", "Retries that waited", delayed, "model")
    suspects = _list(dict.fromkeys(total.models, 0) | total.suspects)
    yield _build_counter("suspects", "Requests that ended two engines", suspects, "model")
    recoveries = _fill_zeros(total.recoveries, _pair(total.models, _RECOVERIES))
    text = "Streams that another engine went on with"
    yield _build_counter("recoveries", text, recoveries, "model", "how")
    text = "Streams that could not be continued: no memory was left to keep their tokens"
    yield _build_counter("streams_not_kept", text, [((), total.streams_not_kept)])


def _list_attainment(total: GatewayMetrics) -> Iterator[Family]:
    """Goodput is the rate of requests that missed no target."""
    # Not those of models whose responses are not measured, as no attainment is not 0.
    models = dict.fromkeys(model for model, _ in total.slo_results)
    attained = _fill_zeros(total.slo_results, _pair(models, _MISSED))
    yield _build_counter("slo", "Answers by what they missed", attained, "model", "missed")
    slo = total.slo
    targets = [("ttft", slo.ttft_s), ("tpot", slo.tpot_s)] if slo is not None else []
    targets += [("itl_p99", slo.itl_p99_s)] if slo is not None and slo.itl_p99_s else []
    text = "What answers are measured against"
    yield build_gauge("cleave_gateway_slo_target_seconds", text, targets, "slo")


def _list_events(total: GatewayMetrics) -> Iterator[Family]:
    handoffs = _list(dict.fromkeys(("used", "failed", "refused"), 0) | total.handoffs)
    yield _build_counter("handoffs", "KV handoffs by result", handoffs, "result")
    canaries = _list({"good": 0} | total.canaries)
    yield _build_counter("kv_canaries", "Canary handoffs by result", canaries, "result")
    text = "Time of engines that canary handoffs took"
    yield _build_counter("kv_canary_seconds", text, _list(total.canary_seconds), "phase")
    zeros = ((model, *roles) for model in list(total.models) for roles in _FLIPS)
    flips = _fill_zeros(total.flips, zeros)
    yield _build_counter("flips", "Changes of roles", flips, "model", "from", "to")
    yield _build_counter("spans", "Spans of traces by result", _list(total.spans), "result")


def _list_states(total: GatewayMetrics) -> Iterator[Family]:
    for name, text, value in (
        ("requests_in_flight", "Requests being served", total.in_flight),
        ("requests_waiting", "Of these, waiting for a turn", total.waiting),
        ("flex_in_flight", "Requests of the tier flex that run or wait", total.flex_in_flight),
        ("flex_waiting", "Of these, waiting for idle capacity", total.flex_waiting),
        ("keys_stale", "1: the previous API keys are in use", total.keys_stale),
        ("processes", "Processes that serve", total.processes),
    ):
        yield build_gauge(f"cleave_gateway_{name}", text, [((), value)])
    yield build_gauge(
        "cleave_gateway_plan_threshold_tokens",
        "Prompt lengths from the plan that this gateway applies; 0: none",
        [("short_prompt", total.whole_below_tokens), ("overlap_min", total.ahead_from_tokens)],
        "threshold",
    )
    text = "Unix time when the TLS certificate in use expires"
    expiries = list(total.certificate_expiries.items())
    name = "cleave_gateway_certificate_expiry_timestamp_seconds"
    yield build_gauge(name, text, expiries, "port")
    text = "Processes that were replaced"
    yield _build_counter("process_restarts", text, [((), total.restarts)])


def _list_models(total: GatewayMetrics) -> Iterator[Family]:
    models = list(total.models.items())
    for key, text in (
        ("prompt_tokens", "Prompt tokens, estimated if the engine reports none"),
        ("output_tokens", "Tokens sent to clients"),
        ("handoff_tokens", "Prompt tokens whose KV was handed over"),
    ):
        yield _build_counter(
            key, text, [(name, getattr(each, key)) for name, each in models], "model"
        )
    by_role = "model", "role"
    for name, text, bounds in (
        ("ttft", "Request read to first byte of stream", TTFT_BOUNDS_S),
        ("tpot", "Mean time between tokens of a stream", TPOT_BOUNDS_S),
        ("itl", "Each gap between pieces of some streams", total.itl_bounds_s),
    ):
        yield _build_histogram(f"{name}_seconds", text, bounds, _list_roles(models, name), *by_role)
    text = "Wait for a turn, where tenants or targets have limits"
    waits = ((name, *_split(each.queue)) for name, each in models)
    yield _build_histogram("queue_seconds", text, TTFT_BOUNDS_S, waits, "model")
    text = "Sending to an instance to its first bytes, of split requests"
    phases = _list_roles(models, "phases")
    yield _build_histogram("phase_seconds", text, TTFT_BOUNDS_S, phases, "model", "phase")
    text = "Prompt tokens of a request that was answered"
    prompts = ((name, *_split(each.prompt_lengths)) for name, each in models)
    yield _build_histogram("request_prompt_tokens", text, LENGTH_BOUNDS, prompts, "model")
    text = "Tokens of the answer to a request"
    outputs = ((name, *_split(each.output_lengths)) for name, each in models)
    yield _build_histogram("request_output_tokens", text, LENGTH_BOUNDS, outputs, "model")
    # Tokens take the place of observations. There is no sum: new tokens have no time.
    text = "Prompt tokens by the time since an earlier prompt began alike; +Inf: new ones"
    reuse = ((name, list(each.to_list()), None) for name, each in list(total.reuse_times.items()))
    yield _build_histogram("prompt_reuse_seconds", text, BOUNDS_S, reuse, "model")


def _list_roles(models: Iterable[tuple[str, ModelMetrics]], name: str) -> Iterator[Row]:
    """The histograms of each model, by role or phase."""
    for model, metrics in models:
        histograms: Mapping[str, BucketHistogram] = getattr(metrics, name)
        for role, histogram in list(histograms.items()):
            yield (model, role), *_split(histogram)


def _split(histogram: BucketHistogram) -> tuple[list[float], float]:
    """(counts, sum)"""
    *counts, total = histogram.to_list()
    return counts, total


def _list(counted: Mapping[Any, float]) -> list[tuple[Key, float]]:
    return list(counted.items())


def _pair(models: Iterable[str], values: Iterable[str]) -> Iterator[tuple[str, str]]:
    return ((model, value) for model in list(models) for value in values)


def _fill_zeros(counted: Mapping[Any, int], expected: Iterable[Key]) -> Iterator[tuple[Key, float]]:
    """The counts, and zeros for what is expected and has not been counted yet."""
    rest = dict(counted)
    for key in expected:
        yield key, rest.pop(key, 0)
    yield from rest.items()


def _build_counter(
    name: str, text: str, series: Iterable[tuple[Key, float]], *labels: str
) -> Family:
    return build_counter(f"cleave_gateway_{name}", text, series, *labels)


def _build_histogram(
    name: str, text: str, bounds: tuple[float, ...], rows: Iterable[Row], *labels: str
) -> Family:
    return build_histogram(f"cleave_gateway_{name}", text, bounds, rows, *labels)
