"""Reads past traffic from Prometheus: rate over time and histograms of requests' lengths.

Called by `cleave workload --prometheus`. What is hard: histograms have buckets instead of requests.
Lengths are therefore drawn evenly inside a bucket, prompt and output independently, and burstiness
is unknown. Cleave's gateways count each request once. Where there are none, one server holds many
engines: of several models, with buckets of their own, and with both engines of a split request,
each of which counts it.
"""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import httpx
import msgspec
import numpy as np
from numpy.typing import NDArray

from cleave.traffic.recordings.history_error import HistoryError
from cleave.traffic.workload import Demand, GeneratedRequests, IndependentLengths, Quantiles


class _Source(NamedTuple):
    """Who counted the requests: names of metrics, and their label with the model."""

    prompts: str
    outputs: str
    requests: str
    model: str


_GATEWAYS = _Source(
    "cleave_gateway_request_prompt_tokens_bucket",
    "cleave_gateway_request_output_tokens_bucket",
    "cleave_gateway_request_prompt_tokens_count",
    "model",
)
_ENGINES = _Source(
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_success_total",
    "model_name",
)
TIMEOUT_S = 15.0
"""Timeout for each part of a response and for the whole response."""
MAX_RESPONSE_BYTES = 1 << 24
_MAX_POINTS = 1000
"""Most points of the rate over time; Prometheus itself returns at most 11,000."""
_MIN_STEP_S = 60.0
_PREFILL_SHARE = 0.99
"""Share of requests with one generated token from which on an engine only prefills."""
_SPLIT_SHARE = 0.2
"""Share of such requests from which on a remark says what they may be."""
_SLIGHT_FALL = 0.02
"""Share of the requests by which a larger bucket may have fewer: scrapes lie between."""
_RATE_WINDOW_S = 240.0
"""Shorter windows contain too few scrapes, which are 15 to 60 seconds apart."""


@dataclass(frozen=True, slots=True, eq=False)
class PrometheusTraffic:
    """Past traffic as read from a Prometheus server."""

    times_s: NDArray[np.float64]
    """Unix time at the end of each step."""
    rates: NDArray[np.float64]
    """Mean req/s in each step, without gaps in the recording."""
    prompt_tokens: Quantiles
    output_tokens: Quantiles
    num_requests: float
    """Number of requests in the window, by the histogram of prompts."""
    share_beyond: float
    """Share of prompts or outputs above the last finite bucket; they are drawn at its bound."""
    remarks: tuple[str, ...] = ()
    """What was left out, one sentence each."""

    def build_demand(self, rate: float | None = None, burstiness: float = 1.0) -> Demand:
        """A demand with these lengths, arriving at `rate` (default: the mean of the window)."""
        lengths = IndependentLengths(self.prompt_tokens, self.output_tokens)
        return Demand(rate or float(np.mean(self.rates)), GeneratedRequests(lengths, burstiness))


def read_traffic(
    url: str, end_s: float, window_s: float, model: str | None = None
) -> PrometheusTraffic:
    """Read the traffic of the `window_s` seconds before the Unix time `end_s`. `model`: only
    requests with this name of a model. Raises HistoryError."""
    if not (math.isfinite(window_s) and window_s >= _MIN_STEP_S):
        raise HistoryError(f"window {window_s:g} s: must be at least {_MIN_STEP_S:g} s")
    # PromQL strings are quoted like JSON's.
    quoted = msgspec.json.encode(model).decode() if model else ""
    with _open_client(url) as client:
        for source in (_GATEWAYS, _ENGINES):
            chosen = f"{{{source.model}={quoted}}}" if model else ""
            span = chosen, end_s, window_s
            if prompts := _query_histograms(client, source, source.prompts, *span):
                break
        outputs = _query_histograms(client, source, source.outputs, *span) if prompts else {}
        if not outputs:
            raise HistoryError(
                f"Prometheus holds no {source.outputs if prompts else source.prompts}{chosen} in "
                f"these {int(window_s)} s: choose a longer window or another model, or check "
                "whether Cleave's gateways or vLLM are scraped"
            )
        times_s, rates = _query_rates(client, source.requests + chosen, end_s, window_s)
    _check_one_model(prompts)
    prefilling = _find_prefilling(outputs) if source is _ENGINES else set()
    counted = [each for engine, each in prompts.items() if engine not in prefilling]
    prompt_lengths = _merge(counted or list(prompts.values()))
    output_lengths = _merge([each for key, each in outputs.items() if key not in prefilling])
    rates = rates * (prompt_lengths.total / sum(each.total for each in prompts.values()))
    lengths = prompt_lengths.to_quantiles(), output_lengths.to_quantiles()
    beyond = max(prompt_lengths.share_beyond, output_lengths.share_beyond)
    remarks: tuple[str, ...] = ("requests as Cleave's gateways count them",)
    if source is _ENGINES:
        remarks = tuple(_describe_split(prefilling, outputs, output_lengths))
    return PrometheusTraffic(times_s, rates, *lengths, prompt_lengths.total, beyond, remarks)


@contextmanager
def _open_client(url: str) -> Iterator[httpx.Client]:
    """An HTTP client whose errors become HistoryErrors with the server's URL, not its password."""
    try:
        base = httpx.URL(url)
        if base.scheme not in ("http", "https") or not base.host:
            raise httpx.InvalidURL("state a URL such as http://prometheus:9090")
        server = str(base.copy_with(userinfo=b""))
        with httpx.Client(base_url=base, timeout=TIMEOUT_S) as client:
            yield client
    except httpx.InvalidURL as error:
        raise HistoryError(f"Prometheus: {error}") from error
    except httpx.TimeoutException as error:
        raise HistoryError(f"Prometheus at {server}: no response within {TIMEOUT_S:g} s") from error
    except httpx.HTTPError as error:
        raise HistoryError(f"Prometheus at {server}: {error}") from error


class _Engine(NamedTuple):
    """Whose histogram it is: an engine's, or a gateway's."""

    model: str
    instance: str


class _LengthHistogram(NamedTuple):
    bounds: NDArray[np.float64]
    """Finite upper bounds of the buckets."""
    counts: NDArray[np.float64]
    """Number of requests up to each bound."""
    total: float
    """Number of requests."""

    @property
    def share_beyond(self) -> float:
        return 1 - float(self.counts[-1]) / self.total

    @property
    def share_of_single(self) -> float:
        """Share of requests of one token."""
        return float(self.count_up_to(np.ones(1))[0]) / self.total

    def to_quantiles(self) -> Quantiles:
        """Linear inside each bucket; an empty bucket is a jump."""
        levels = np.concatenate(([0.0], self.counts / self.total, [1.0]))
        tokens = np.maximum(np.concatenate(([1.0], self.bounds, self.bounds[-1:])), 1.0)
        return Quantiles(tuple(levels.tolist()), tuple(tokens.tolist()))

    def count_up_to(self, bounds: NDArray[np.float64]) -> NDArray[np.float64]:
        """Requests up to each of these bounds. Those above the last bucket have at most the next
        bound: vLLM's buckets end at the last round number below the engine's longest request."""
        ends = np.concatenate(([0.0], self.bounds))
        counts: NDArray[np.float64] = np.interp(bounds, ends, np.concatenate(([0.0], self.counts)))
        counts[bounds > self.bounds[-1]] = self.total
        return counts


def _check_one_model(histograms: Mapping[_Engine, _LengthHistogram]) -> None:
    """Raise HistoryError if several models have served requests: each is a deployment."""
    requests: Counter[str] = Counter()
    for engine, each in histograms.items():
        requests[engine.model] += round(each.total)
    if len(requests) > 1:
        found = ", ".join(f"{model} ({num:,} requests)" for model, num in requests.most_common(5))
        raise HistoryError(f"Prometheus holds several models: {found}; choose one with --model")


def _find_prefilling(outputs: Mapping[_Engine, _LengthHistogram]) -> set[_Engine]:
    """The engines that generate one token for each request, if others generate more: requests that
    these prefill are counted again where they are decoded."""
    found = {key for key, each in outputs.items() if each.share_of_single >= _PREFILL_SHARE}
    return found if len(found) < len(outputs) else set()


def _describe_split(
    prefilling: Collection[_Engine],
    outputs: Mapping[_Engine, _LengthHistogram],
    counted: _LengthHistogram,
) -> Iterator[str]:
    if prefilling:
        what = f"{len(prefilling)} of {len(outputs)} engines generate one token per request"
        yield f"{what}: as prefill engines of split requests they are not counted"
    elif counted.share_of_single > _SPLIT_SHARE:
        what = f"{counted.share_of_single:.0%} of requests generated one token"
        yield f"{what}: where prefill engines are among them, each split request counts twice"


def _merge(histograms: Sequence[_LengthHistogram]) -> _LengthHistogram:
    """The requests of all of them, whose buckets may differ. Raises HistoryError."""
    bounds = np.unique(np.concatenate([each.bounds for each in histograms]))
    counts = sum(each.count_up_to(bounds) for each in histograms)
    return _LengthHistogram(bounds, np.asarray(counts), sum(each.total for each in histograms))


def _query_histograms(
    client: httpx.Client, source: _Source, name: str, chosen: str, end_s: float, window_s: float
) -> dict[_Engine, _LengthHistogram]:
    """By engine, or gateway; empty: nobody counted. Raises HistoryError."""
    # `increase` handles counters that restart with their engine.
    query = f"sum by (le, {source.model}, instance) (increase({name}{chosen}[{int(window_s)}s]))"
    series = _query_series(client, "/api/v1/query", {"query": query, "time": str(end_s)})
    buckets: dict[_Engine, list[tuple[float, float]]] = defaultdict(list)
    for each in series:
        if each.value:
            engine = _Engine(each.metric.get(source.model, ""), each.metric.get("instance", ""))
            bucket = _parse_number(each.metric.get("le")), _parse_number(each.value[1])
            buckets[engine].append(bucket)
    found = {engine: sorted(each) for engine, each in buckets.items()}
    found = {engine: each for engine, each in found.items() if each[-1][1] > 0}
    return {engine: _build_histogram(name + chosen, each) for engine, each in found.items()}


def _build_histogram(metric: str, buckets: Sequence[tuple[float, float]]) -> _LengthHistogram:
    total = buckets[-1][1]
    finite = np.array([each for each in buckets if math.isfinite(each[0])]).reshape(-1, 2)
    # Buckets are not scraped at one instant, so a cumulative count may decrease slightly.
    counts = np.maximum.accumulate(finite[:, 1])
    if not counts.any():
        raise HistoryError(f"Prometheus: no finite bucket of {metric} holds a request")
    fall = float((counts - finite[:, 1]).max())
    if fall > max(_SLIGHT_FALL * total, 2):
        what = f"{metric} has fewer requests in a larger bucket"
        why = "engines with different buckets, such as several models, are summed"
        raise HistoryError(f"Prometheus: {what}: {why}; choose one with --model")
    return _LengthHistogram(finite[:, 0], np.minimum(counts, total), total)


def _query_rates(
    client: httpx.Client, metric: str, end_s: float, window_s: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    step_s = max(_MIN_STEP_S, math.ceil(window_s / _MAX_POINTS))
    query = f"sum(rate({metric}[{int(max(step_s, _RATE_WINDOW_S))}s]))"
    span = {"start": str(end_s - window_s + step_s), "end": str(end_s), "step": str(step_s)}
    series = _query_series(client, "/api/v1/query_range", {"query": query, **span})
    points = [(at, _parse_number(rate)) for each in series for at, rate in each.values]
    points_found = np.array([point for point in points if math.isfinite(point[1])]).reshape(-1, 2)
    if not points_found[:, 1].any():
        raise HistoryError(f"Prometheus holds no rate of {metric} in the window")
    return points_found[:, 0], points_found[:, 1]


class Series(msgspec.Struct):
    """A series: its labels, and its sample or samples, (Unix time, value as text) each."""

    metric: dict[str, str] = {}
    value: tuple[float, str] | None = None
    values: list[tuple[float, str]] = []


class _Data(msgspec.Struct):
    result: list[Series]


class _QueryResponse(msgspec.Struct):
    """A response of Prometheus' HTTP API, version 1."""

    status: str
    data: _Data | None = None
    error: str = "no reason given"


def _query_series(client: httpx.Client, path: str, query: Mapping[str, str]) -> Sequence[Series]:
    """The series in the server's response."""
    deadline_s = time.monotonic() + TIMEOUT_S
    with client.stream("GET", path, params=query) as response:
        body = bytearray()
        for chunk in response.iter_bytes():
            body += chunk
            if len(body) > MAX_RESPONSE_BYTES:
                limit = f"{MAX_RESPONSE_BYTES >> 20} MiB"
                raise HistoryError(f"Prometheus: the response is over {limit}")
            if time.monotonic() > deadline_s:
                raise httpx.ReadTimeout("the response is too slow")
    try:
        return decode_series(body, path, response.status_code)
    except HistoryError as error:
        raise HistoryError(f"Prometheus: {error}") from error


def decode_series(body: bytes | bytearray, path: str, status: int) -> Sequence[Series]:
    """The series in the response to a query. Raises HistoryError."""
    try:
        reply = msgspec.json.decode(body, type=_QueryResponse)
    except msgspec.DecodeError as error:
        raise HistoryError(f"{path} answered {status}, not as Prometheus does: {error}") from error
    if reply.status != "success" or reply.data is None:
        raise HistoryError(f"{path} answered {status}: {reply.error}")
    return reply.data.result


def _parse_number(text: object) -> float:
    """Prometheus writes numbers as text, including NaN and +Inf."""
    try:
        return float(str(text))
    except ValueError as error:
        raise HistoryError(f"Prometheus: {text!r} is not a number") from error
