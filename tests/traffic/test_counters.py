"""Two pages of a gateway, and what they say of the time between."""

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.gateway.metrics.gateway_metrics import (
    TTFT_BOUNDS_S,
    GatewayMetrics,
    SloTargets,
    record_flex,
)
from cleave.traffic.counters import (
    Buckets,
    CounterHistory,
    CountsError,
    GatewayCounters,
    compute_rates,
    parse_metrics_page,
    select_lines,
)

from tests.support.metrics_page import write_gateway_page


def write_page(metrics: GatewayMetrics) -> str:
    return write_gateway_page(metrics).decode()


def answer(metrics: GatewayMetrics, model: str, ttft_s: float, missed: str = "") -> None:
    metrics.requests[model, "ok"] += 1
    metrics.slo_results[model, missed] += 1
    metrics.models[model].prompt_tokens += 100
    metrics.models[model].output_tokens += 20
    metrics.models[model].prompt_lengths.observe(100)
    metrics.models[model].output_lengths.observe(20)
    metrics.models[model].ttft["prefill"].observe(ttft_s)
    metrics.models[model].tpot["decode"].observe(0.012)


@pytest.fixture
def metrics() -> GatewayMetrics:
    return GatewayMetrics(SloTargets(0.4, 0.04))


def test_tokens_that_repeat_are_read_by_their_time(metrics: GatewayMetrics) -> None:
    assert parse_metrics_page(write_page(metrics), 1.0).reuse.num == 0
    metrics.reuse_times["m"].add(30.0, 5)
    metrics.reuse_times["n"].add(20.0, 800)
    metrics.reuse_times["n"].add_new(50.0)
    reuse = parse_metrics_page(write_page(metrics), 1.0).reuse
    assert reuse.num == 100
    assert dict(zip(reuse.bounds, reuse.counts, strict=True))[1.0] == 30
    assert reuse.compute_quantile(0.5) == 128


def test_answers_that_met_one_target_are_counted_apart(metrics: GatewayMetrics) -> None:
    for missed in ("", "", "ttft", "tpot", "tpot", "ttft_and_tpot", "unserved"):
        answer(metrics, "m", 0.1, missed)
    found = parse_metrics_page(write_page(metrics), 1.0)
    assert (found.measured, found.attained) == (7, 2)
    assert (found.ttft_attained, found.tpot_attained) == (4, 3)


def test_the_share_of_gaps_within_their_target_is_exact() -> None:
    """Whatever the target, since it bounds a bucket."""
    metrics = GatewayMetrics(SloTargets(0.4, 0.04, 33.3 / 1000))
    for gap_s in (0.001, 0.0332, 0.0334, 0.2):
        metrics.models["m"].itl["mixed"].observe(gap_s)
    page = write_page(metrics)
    assert f'slo_target_seconds{{slo="itl_p99"}} {33.3 / 1000!r}' in page
    gaps = parse_metrics_page(page, 1.0).itl
    assert gaps.compute_share(33.3 / 1000) == 0.5
    assert gaps.compute_quantile(0.5) == 33.3 / 1000
    assert parse_metrics_page(write_page(GatewayMetrics()), 1.0).itl.compute_share(0.1) == 1.0


def test_requests_of_the_tier_flex_are_read_apart(metrics: GatewayMetrics) -> None:
    answer(metrics, "m", 0.15)
    before = parse_metrics_page(write_page(metrics), 1.0)
    record_flex(metrics, "m", "", "ok", 100, 20)
    after = parse_metrics_page(write_page(metrics), 1.0)
    assert (before.flex_tokens, after.flex_tokens) == (0, 120)
    assert replace(after, flex_tokens=0) == before, "nothing else counts them"


def test_a_gateways_page_is_read_as_it_is_written(metrics: GatewayMetrics) -> None:
    answer(metrics, "m", 0.15)
    answer(metrics, "adapter", 0.45, "ttft")
    metrics.requests["", "refused"] += 9
    metrics.requests["m", "shed"] += 1
    metrics.rejections["a", "late"] += 1
    metrics.retries["decode", "lost"] += 2
    metrics.recoveries["m", "continued"] += 3
    metrics.flips["m", "decode", "mixed"] += 4
    metrics.in_flight, metrics.waiting = 7, 5
    metrics.whole_below_tokens, metrics.ahead_from_tokens = 256, 512
    counts = parse_metrics_page(write_page(metrics), 12.0)
    assert parse_metrics_page(select_lines(write_page(metrics)), 12.0) == counts
    assert (counts.at_s, counts.requests) == (12.0, 3)
    assert (counts.measured, counts.attained) == (2, 1)
    assert (counts.prompt_tokens, counts.output_tokens) == (200, 40)
    assert (counts.shed, counts.retries, counts.recoveries, counts.flips) == (1, 2, 3, 4)
    assert (counts.in_flight, counts.waiting) == (7, 5)
    assert counts.whole_below_tokens == 256
    assert (counts.ttft_target_ms, counts.tpot_target_ms) == (400, 40)
    assert counts.ttft.counts[-1] == counts.tpot.counts[-1] == 2
    assert (counts.prompts.num, counts.prompts.mean) == (2, 100)
    assert (counts.outputs.num, counts.outputs.mean) == (2, 20)
    assert counts.ttft.mean == pytest.approx(0.3)
    assert counts.started_s > 0


def test_without_targets_no_attainment_is_computed() -> None:
    metrics = GatewayMetrics()
    metrics.requests["m", "ok"] += 1
    before, after = GatewayCounters(), parse_metrics_page(write_page(metrics), 2.0)
    traffic = compute_rates(before, after)
    assert traffic is not None
    assert (traffic.requests_per_s, traffic.slo_attainment, traffic.goodput) == (0.5, None, None)
    assert (after.ttft_target_ms, traffic.ttft_p90_ms) == (None, None)


def test_answers_that_are_not_streamed_have_no_goodput(metrics: GatewayMetrics) -> None:
    before = parse_metrics_page(write_page(metrics), 100.0)
    metrics.requests["m", "ok"] += 22
    traffic = compute_rates(before, parse_metrics_page(write_page(metrics), 110.0))
    assert traffic is not None
    assert (traffic.requests_per_s, traffic.slo_attainment, traffic.goodput) == (2.2, None, None)


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("<html>", "without metrics"),
        ('cleave_gateway_requests_total{model="m', "not a page of metrics"),
        ("", "without metrics"),
        ("up 1.0\n", "without metrics"),
        ("cleave_gateway_plan_threshold_tokens NaN\n", "not a page of metrics"),
        ("cleave_gateway_requests_total +Inf\n", "not a page of metrics"),
    ],
)
def test_another_page_is_refused(page: str, said: str) -> None:
    with pytest.raises(CountsError, match=said):
        parse_metrics_page(page, 0.0)


def test_a_window_knows_only_what_came_in_it(metrics: GatewayMetrics) -> None:
    for _ in range(50):
        answer(metrics, "m", 9.0, "ttft")
    before = parse_metrics_page(write_page(metrics), 100.0)
    for number in range(40):
        answer(metrics, "m", 0.15, "" if number < 30 else "tpot")
    after = parse_metrics_page(write_page(metrics), 110.0)
    traffic = compute_rates(before, after)
    assert traffic is not None
    assert (traffic.window_s, traffic.requests_per_s, traffic.goodput) == (10.0, 4.0, 3.0)
    assert (traffic.slo_attainment, traffic.output_tokens_per_s) == (0.75, 80.0)
    assert traffic.ttft_p50_ms == pytest.approx(150), "the middle of 100 to 200 ms"
    assert traffic.ttft_p90_ms == pytest.approx(190)
    assert compute_rates(after, after) is None


def test_quantiles_are_prometheus_own() -> None:
    """Of its documentation: linear inside a bucket, the last finite bound beyond it."""
    buckets = Buckets((0.1, 0.2, math.inf), (10.0, 10.0, 20.0))
    assert buckets.compute_quantile_ms(0.25) == pytest.approx(50)
    assert buckets.compute_quantile_ms(0.5) == pytest.approx(100)
    assert buckets.compute_quantile_ms(0.9) == pytest.approx(200)
    assert Buckets((0.1, math.inf), (0.0, 0.0)).compute_quantile_ms(0.5) is None
    assert Buckets().compute_quantile_ms(0.5) is None


@given(
    values=st.lists(st.floats(0.0001, 119.0), min_size=1, max_size=200),
    share=st.floats(0.01, 0.99),
)
def test_a_quantile_lies_in_the_bucket_of_the_value_it_stands_for(
    values: list[float], share: float
) -> None:
    bounds = (*TTFT_BOUNDS_S, math.inf)
    counts = tuple(float(sum(value <= bound for value in values)) for bound in bounds)
    found = Buckets(bounds, counts).compute_quantile_ms(share)
    exact = sorted(values)[math.ceil(share * len(values)) - 1]
    at = next(i for i, bound in enumerate(bounds) if exact <= bound)
    assert found is not None
    assert (bounds[at - 1] if at else 0.0) * 1000 - 1e-6 <= found <= bounds[at] * 1000 + 1e-6


def test_a_window_begins_no_later_than_it_says_and_no_earlier_than_the_start() -> None:
    history = CounterHistory(60.0)
    assert history.get_rates(5.0) is None
    for second in range(100):
        history.add(GatewayCounters(at_s=float(second), started_s=1.0, requests=float(second)))
        traffic = history.get_rates(5.0)
        assert second == 0 or (traffic and traffic.window_s == min(second, 5))
    minute = history.get_rates(60.0)
    assert minute is not None
    assert (minute.window_s, minute.requests_per_s) == (60.0, 1.0)


def test_counts_of_another_start_are_no_part_of_a_window() -> None:
    history = CounterHistory(60.0)
    for second in range(10):
        history.add(GatewayCounters(at_s=float(second), started_s=1.0, requests=1e6))
    history.add(GatewayCounters(at_s=10.0, started_s=9.5, requests=1.0))
    assert history.get_rates(60.0) is None
    history.add(GatewayCounters(at_s=12.0, started_s=9.5, requests=5.0))
    traffic = history.get_rates(60.0)
    assert traffic is not None
    assert (traffic.window_s, traffic.requests_per_s) == (2.0, 2.0)


def test_stored_samples_are_bounded_and_cover_the_window() -> None:
    rng, at_s = random.Random(3), 0.0
    history = CounterHistory(60.0)
    for step_s in itertools.chain((0.2,) * 2_000, (rng.uniform(0.2, 30) for _ in range(500))):
        at_s += step_s
        history.add(GatewayCounters(at_s=at_s, started_s=1.0))
        traffic = history.get_rates(60.0)
        assert traffic is None or traffic.window_s >= min(60.0, at_s - 0.2) - 1e-6
        assert len(history._counters) <= 302
