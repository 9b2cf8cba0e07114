"""One page of metrics for several processes."""

import os
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cleave.gateway.metrics.gateway_metrics import GatewayMetrics, SloTargets
from cleave.gateway.metrics.multiprocess import (
    CounterSaver,
    restore_counters,
    sum_counters,
)
from cleave.gateway.shared_state import SharedGatewayState
from cleave.time_slices import run_at_once

from tests.support.metrics_page import write_gateway_page


@pytest.fixture
def shared_state(tmp_path: Path):
    shared = SharedGatewayState(2, tmp_path)
    yield shared
    shared.close()


def count(metrics: GatewayMetrics, times: int) -> None:
    for _ in range(times):
        metrics.requests["m", "ok"] += 1
        metrics.handoffs["used"] += 1
        metrics.models["m"].output_tokens += 10
        metrics.models["m"].ttft["mixed"].observe(0.02)
        metrics.models["m"].phases["prefill"].observe(100.0)
        metrics.reuse_times["m"].add(7.0, 20)
        metrics.streams += 1


def save(metrics: GatewayMetrics, shared_state: SharedGatewayState) -> None:
    run_at_once(CounterSaver(metrics, shared_state).save())


def scrape(
    metrics: GatewayMetrics, shared_state: SharedGatewayState
) -> dict[tuple[str, tuple[str, ...]], float]:
    save(metrics, shared_state)
    total = run_at_once(sum_counters(metrics, shared_state))
    return {
        (sample.name, tuple(sorted(sample.labels.values()))): sample.value
        for family in text_string_to_metric_families(write_gateway_page(total).decode())
        for sample in family.samples
    }


def test_counts_of_all_processes_are_added_up_and_targets_are_not(shared_state) -> None:
    first, second = shared_state.for_process(0), shared_state.for_process(1)
    ours, theirs = GatewayMetrics(SloTargets(0.4, 0.04)), GatewayMetrics(SloTargets(0.4, 0.04))
    count(ours, 2)
    count(theirs, 3)
    theirs.requests["n", "failed"] += 1
    ours.whole_below_tokens = theirs.whole_below_tokens = 256
    save(theirs, second)
    second.publish_heartbeat(0.0, 1, 4)
    first.publish_heartbeat(0.0, 1, 3)
    page = scrape(ours, first)
    assert page["cleave_gateway_requests_total", ("m", "ok")] == 5
    assert page["cleave_gateway_requests_total", ("failed", "n")] == 1
    assert page["cleave_gateway_prompt_reuse_seconds_bucket", ("4.0", "m")] == 35
    assert page["cleave_gateway_handoffs_total", ("used",)] == 5
    assert page["cleave_gateway_output_tokens_total", ("m",)] == 50
    assert page["cleave_gateway_ttft_seconds_count", ("m", "mixed")] == 5
    assert page["cleave_gateway_ttft_seconds_bucket", ("0.025", "m", "mixed")] == 5
    assert page["cleave_gateway_ttft_seconds_sum", ("m", "mixed")] == pytest.approx(0.1)
    assert page["cleave_gateway_phase_seconds_sum", ("m", "prefill")] == 500
    assert page["cleave_gateway_slo_target_seconds", ("ttft",)] == 0.4
    assert page["cleave_gateway_plan_threshold_tokens", ("short_prompt",)] == 256
    assert page["cleave_gateway_requests_in_flight", ()] == 7


def test_no_counter_decreases_when_a_process_is_killed(shared_state) -> None:
    first, second = shared_state.for_process(0), shared_state.for_process(1)
    dying, other = GatewayMetrics(), GatewayMetrics()
    count(dying, 5)
    scraped = scrape(dying, first)
    count(dying, 2)
    shared_state.clear_process(0)
    after = scrape(other, second)
    successor = GatewayMetrics()
    run_at_once(restore_counters(successor, first, 0))
    count(successor, 1)
    later = scrape(successor, first)
    name = "cleave_gateway_requests_total", ("m", "ok")
    assert (scraped[name], after[name], later[name]) == (5, 5, 6)
    assert later["cleave_gateway_ttft_seconds_count", ("m", "mixed")] == 6
    assert successor.streams == 6


def test_processes_that_serve_and_were_replaced_are_counted(shared_state) -> None:
    first = shared_state.for_process(0)
    first.register_process(os.getpid())
    shared_state.record_restart()
    page = scrape(GatewayMetrics(), first)
    assert page["cleave_gateway_processes", ()] == 1
    assert page["cleave_gateway_process_restarts_total", ()] == 1
    assert page["process_resident_memory_bytes", ()] > 0
    assert page["process_cpu_seconds_total", ()] > 0
