"""Own counters against prometheus_client's."""

import random

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as Reference
from prometheus_client.parser import text_string_to_metric_families

from cleave.api.enums import DispatchPolicy
from cleave.gateway.failover.retry_policy import Failure
from cleave.gateway.metrics.families import write_page
from cleave.gateway.metrics.gateway_metrics import (
    RETRY_CAUSES,
    TTFT_BOUNDS_S,
    GatewayMetrics,
    SloTargets,
    record_completed,
)
from cleave.gateway.metrics.instance_metrics import CacheHitPage
from cleave.rpc.v1 import agent_pb2
from cleave.time_slices import run_at_once

from tests.support.metrics_page import write_gateway_page


def render(page: CacheHitPage) -> bytes:
    return b"".join(run_at_once(write_page(run_at_once(page.collect()))))


ASK = {"model": "m", "prompt": "hello", "max_tokens": 3}
STREAM = ASK | {"stream": True}


def test_histograms_are_written_as_prometheus_itself_would() -> None:
    rng = random.Random(7)
    metrics, registry = GatewayMetrics(), CollectorRegistry()
    name, text = "cleave_gateway_ttft_seconds", "Request read to first byte of stream"
    labels = ["model", "role"]
    reference = Reference(name, text, labels, buckets=TTFT_BOUNDS_S, registry=registry)
    for value in [*TTFT_BOUNDS_S, *(rng.expovariate(1.0) for _ in range(1_000)), 0.0, 1e6]:
        metrics.models["m"].ttft["prefill"].observe(value)
        reference.labels("m", "prefill").observe(value)
    lines = [
        {line for line in page.decode().splitlines() if line.startswith(name)}
        for page in (write_gateway_page(metrics), generate_latest(registry))
    ]
    assert lines[0] == {line for line in lines[1] if "_created" not in line}


def list_counts(metrics: GatewayMetrics) -> dict[str, float]:
    """Values of all series of counters, by their text."""
    lines = write_gateway_page(metrics).decode().splitlines()
    counted = [line for line in lines if line.startswith("cleave_") and "_total" in line]
    pairs = (line.rpartition(" ") for line in counted)
    return {series: float(value) for series, _, value in pairs}


def test_rare_events_are_counted_from_zero_for_prometheus_takes_no_rate_of_a_first_sample() -> None:
    metrics = GatewayMetrics(SloTargets(1.0, 0.1))
    record_completed(metrics, "m", "", "ok", 9, 5, (0.1, 0.1))
    before = list_counts(metrics)
    for outcome in ("failed", "broken", "unavailable", "shed"):
        record_completed(metrics, "m", "", outcome, 0, 0, None)
    record_completed(metrics, "m", "", "ok", 9, 5, (2.0, 0.1))
    record_completed(metrics, "m", "", "ok", 9, 5, (0.1, 2.0))
    record_completed(metrics, "m", "", "ok", 9, 5, (2.0, 2.0))
    metrics.retries["decode", Failure.LOST.value] += 1
    metrics.recoveries["m", "continued"] += 1
    metrics.handoffs["refused"] += 1
    metrics.suspects["m"] += 1
    metrics.flips["m", "decode", "mixed"] += 1
    grown = {series for series, value in list_counts(metrics).items() if value > before[series]}
    assert len(grown) == 4 + 4 + 5 + 3, "outcomes, targets, events, and counts that had begun"


def test_a_model_whose_answers_are_not_measured_has_no_attainment() -> None:
    metrics = GatewayMetrics(SloTargets(1.0, 0.1))
    record_completed(metrics, "m", "", "ok", 9, 5, None)
    assert not [series for series in list_counts(metrics) if "slo_total" in series]


def test_causes_of_retries_are_those_of_failures() -> None:
    assert [failure.value for failure in Failure] == list(RETRY_CAUSES)


async def read_page(stage) -> str:
    return (await stage.ask(path="/metrics")).body.decode()


async def test_latencies_are_exported_by_role(make_stage) -> None:
    stage = await make_stage({"p": "prefill", "d": "decode"})
    await stage.ask(STREAM)
    # One stream in eight has its gaps timed.
    for _ in range(8):
        await stage.ask(STREAM)
    page = await read_page(stage)
    assert 'cleave_gateway_ttft_seconds_count{model="m",role="prefill"} 9.0' in page
    assert 'cleave_gateway_tpot_seconds_count{model="m",role="decode"} 9.0' in page
    assert 'cleave_gateway_itl_seconds_count{model="m",role="decode"}' in page
    assert page.count("cleave_gateway_ttft_seconds_count") == 1


async def test_gaps_of_the_tier_flex_which_may_wait_are_not_timed(single) -> None:
    for _ in range(16):
        await single.ask(STREAM | {"service_tier": "flex"})
    assert "itl_seconds_count" not in await read_page(single)


async def test_an_instance_of_both_phases_is_exported_as_such(single) -> None:
    await single.ask(STREAM)
    page = await read_page(single)
    assert 'cleave_gateway_ttft_seconds_count{model="m",role="mixed"} 1.0' in page
    assert 'cleave_gateway_tpot_seconds_count{model="m",role="mixed"} 1.0' in page


async def test_tokens_that_were_handed_over_are_counted(pair, single) -> None:
    await pair.ask(ASK)
    await single.ask(ASK)
    assert 'cleave_gateway_handoff_tokens_total{model="m"} 7.0' in await read_page(pair)
    assert 'cleave_gateway_handoff_tokens_total{model="m"} 0.0' in await read_page(single)


async def test_instances_are_exported_by_role_and_state_even_when_none_is_ready(pair) -> None:
    pair.state(pair.engines["p"], state=agent_pb2.STATE_DRAINING)
    page = await read_page(pair)
    name = "cleave_gateway_instances"
    assert f'{name}{{model="m",role="prefill",state="draining"}} 1.0' in page
    assert f'{name}{{model="m",role="prefill",state="ready"}} 0.0' in page
    assert f'{name}{{model="m",role="decode",state="ready"}} 1.0' in page


async def test_the_age_of_the_youngest_cache_is_exported_of_instances_that_report_it(pair) -> None:
    name = "cleave_gateway_engine_kv_age_seconds_min"
    assert f"{name}{{" not in await read_page(pair)
    instances = pair.context.router.registry.instances
    boot_id = instances["d"].registration.boot_id
    load = agent_pb2.LoadReport(boot_id=boot_id, oldest_kv_ms=90_500)
    assert instances["d"].update_load(load, pair.context.clock())
    assert f'{name}{{model="m",role="decode"}} 90.5' in await read_page(pair)


async def test_lines_of_cache_hits_are_those_of_a_parser_and_of_present_instances(
    make_stage,
) -> None:
    stage = await make_stage({"x": "mixed"}, policy=DispatchPolicy.PREFIX_AWARE)
    registry = stage.context.router.registry
    (instance,) = registry.instances.values()
    instance.registration.model = 'a "model"\\ of\ntwo lines'
    page = CacheHitPage(registry)
    for _ in range(2):
        families = {
            each.name: each for each in text_string_to_metric_families(render(page).decode())
        }
        prompts = families["cleave_gateway_cache_prompt_tokens"]
        assert prompts.type == "counter"
        assert [each.labels for each in prompts.samples] == [
            {"model": instance.registration.model, "engine": "x", "source": source}
            for source in ("sent", "predicted")
        ]
    registry.instances.clear()
    assert b'engine="x"' not in render(page)


async def test_predicted_and_real_cache_hits_are_exported_by_instance(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, policy=DispatchPolicy.PREFIX_AWARE)
    for _ in range(2):
        await stage.ask({"model": "m", "prompt": "s" * 4_095})
    (instance,) = stage.context.router.registry.instances.values()
    load = agent_pb2.LoadReport(
        boot_id=instance.registration.boot_id, prefix_cache_queries=2_000, prefix_cache_hits=500
    )
    instance.update_load(load, stage.context.clock())
    page = await read_page(stage)
    labels = 'engine="x",model="m",source='
    found = {
        (kind, source): float(
            page.partition(f'cleave_gateway_cache_{kind}_tokens_total{{{labels}"{source}"}} ')[
                2
            ].split()[0]
        )
        for kind in ("prompt", "hit")
        for source in ("predicted", "engine")
    }
    assert (found["prompt", "engine"], found["hit", "engine"]) == (2_000, 500)
    assert found["prompt", "predicted"] == pytest.approx(2_050, abs=10)
    assert found["hit", "predicted"] == pytest.approx(1_025, abs=10)


async def test_hits_in_host_memory_are_exported_of_instances_that_have_some(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, policy=DispatchPolicy.PREFIX_AWARE)
    (instance,) = stage.context.router.registry.instances.values()
    name = "cleave_gateway_cache_host_hit_tokens_total"
    load = agent_pb2.LoadReport(
        boot_id=instance.registration.boot_id,
        prefix_cache_queries=2_000,
        prefix_cache_hits=500,
        host_kv_hits=300,
    )
    instance.update_load(load, stage.context.clock())
    assert f"{name}{{" not in await read_page(stage)
    instance.host_tokens = 10_000
    instance.in_flight.count_loaded(200.0)
    page = await read_page(stage)
    labels = 'engine="x",model="m",source='
    assert f'{name}{{{labels}"predicted"}} 200.0' in page
    assert f'{name}{{{labels}"engine"}} 300.0' in page
    assert f'cleave_gateway_cache_hit_tokens_total{{{labels}"engine"}} 800.0' in page, "of both"


async def test_lengths_are_exported_for_answered_requests(pair) -> None:
    await pair.ask(ASK)
    await pair.ask(ASK | {"model": "nobody"})
    page = await read_page(pair)
    name = "cleave_gateway_request"
    assert f'{name}_prompt_tokens_sum{{model="m"}} 7.0' in page
    assert f'{name}_output_tokens_count{{model="m"}} 1.0' in page
    assert f'{name}_output_tokens_bucket{{le="4.0",model="m"}} 1.0' in page
