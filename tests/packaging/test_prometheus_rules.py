"""Records and alerts of the chart, evaluated by Prometheus' own engine: silent when all is well,
and each fires when its cause occurs."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
STEP_S = 60
HOURS = 7

GONE_STEPS = 10
Series = dict[str, float | None]
"""A series by its text, and how much it grows in a minute; gauges are written `=name`. None: it was
a gauge at 2, and has been gone for ten minutes."""
DAY_S = 86_400
"""Pages begin at second 0."""

WELL: Series = {
    'cleave_gateway_slo_total{model="m",missed=""}': 590,
    'cleave_gateway_slo_total{model="m",missed="ttft"}': 10,
    'cleave_gateway_requests_total{model="m",outcome="ok"}': 600,
    'cleave_gateway_handoffs_total{result="used"}': 500,
    'cleave_gateway_handoffs_total{result="refused"}': 1,
    'cleave_kv_lost_total{reason="peer_lost"}': 1,
    'cleave_kv_lost_total{reason="expired"}': 50,
    "vllm:nixl_num_failed_transfers_total": 1,
    '=vllm:num_requests_running{model_name="m"}': 2,
    'cleave_gateway_flips_total{model="m",from="decode",to="mixed"}': 0.1,
    **{
        f'cleave_gateway_cache_{kind}_tokens_total{{model="m",engine="a",source="{source}"}}': count
        for source, prompt, hit in (("predicted", 50_000, 20_000), ("engine", 60_000, 22_000))
        for kind, count in (("prompt", prompt), ("hit", hit))
    },
    'cleave_gateway_cache_prompt_tokens_total{model="m",engine="a",source="sent"}': 55_000,
    "cleave_gateway_process_restarts_total": 0,
    'cleave_gateway_suspects_total{model="m"}': 0,
    "=cleave_gateway_keys_stale": 0,
    '=cleave_gateway_certificate_expiry_timestamp_seconds{port="https"}': 30 * DAY_S,
    "=cleave_operator_webhook_certificate_expiry_timestamp_seconds": 30 * DAY_S,
    '=cleave_gateway_instances{model="m",role="decode",state="ready"}': 2,
    '=cleave_gateway_instances{model="m",role="prefill",state="ready"}': 2,
    "=cleave_operator_leading": 1,
    "=cleave_operator_queue_depth": 3,
    '=cleave_operator_plan_drifted{deployment="default/chat",model="m"}': 0,
    '=cleave_gateway_kv_pairs{model="m",state="proven"}': 16,
    '=cleave_gateway_kv_pairs{model="m",state="closed"}': 0,
    '=cleave_gateway_kv_pairs{model="m",state="unproven"}': 0,
    '=cleave_gateway_kv_proof_age_seconds_max{model="m"}': 40,
    'cleave_gateway_kv_canaries_total{result="good"}': 3,
    '=cleave_operator_prediction_holds{deployment="default/chat",model="m"}': 1,
    '=cleave_operator_kv_rate_as_planned{deployment="default/chat",model="m"}': 1,
}
ILL: dict[str, Series] = {
    "CleaveSloBurnsFast": {'cleave_gateway_slo_total{model="m",missed="ttft"}': 400},
    "CleaveSloBurns": {'cleave_gateway_slo_total{model="m",missed="tpot"}': 80},
    "CleaveNoInstanceReady": {
        '=cleave_gateway_instances{model="m",role="decode",state="ready"}': 0
    },
    "CleaveFleetIsGone": {
        '=cleave_gateway_instances{model="m",role="decode",state="ready"}': None,
        '=cleave_gateway_instances{model="m",role="prefill",state="ready"}': None,
        'cleave_gateway_requests_total{model="m",outcome="unavailable"}': 1,
    },
    "CleaveManyRequestsFail": {'cleave_gateway_requests_total{model="m",outcome="failed"}': 20},
    "CleaveRequestsFail": {'cleave_gateway_requests_total{model="m",outcome="broken"}': 1},
    "CleaveHandoffsFail": {'cleave_gateway_handoffs_total{result="refused"}': 20},
    "CleavePairsFail": {'=cleave_gateway_kv_pairs{model="m",state="closed"}': 1},
    "CleaveProofsAreStale": {'=cleave_gateway_kv_proof_age_seconds_max{model="m"}': 700},
    "CleaveEnginesUnscraped": {'=vllm:num_requests_running{model_name="m"}': None},
    "CleaveCachesAreNotAsPredicted": {
        'cleave_gateway_cache_hit_tokens_total{model="m",engine="a",source="engine"}': 10_000
    },
    "CleavePoolsFlap": {'cleave_gateway_flips_total{model="m",from="decode",to="mixed"}': 2},
    "CleaveGatewayProcessesDie": {"cleave_gateway_process_restarts_total": 1},
    "CleaveRequestsEndEngines": {'cleave_gateway_suspects_total{model="m"}': 1},
    "CleaveApiKeysAreStale": {"=cleave_gateway_keys_stale": 1},
    "CleaveCertificateExpires": {
        '=cleave_gateway_certificate_expiry_timestamp_seconds{port="https"}': 2 * DAY_S
    },
    "CleaveWebhookCertificateExpires": {
        "=cleave_operator_webhook_certificate_expiry_timestamp_seconds": 2 * DAY_S
    },
    "CleaveOperatorDoesNotLead": {"=cleave_operator_leading": 0},
    "CleaveOperatorFallsBehind": {"=cleave_operator_queue_depth": 500},
    "CleavePlanDrifts": {'=cleave_operator_plan_drifted{deployment="default/chat",model="m"}': 1},
    "CleaveKvIsSlow": {
        '=cleave_operator_kv_rate_as_planned{deployment="default/chat",model="m"}': 0
    },
    "CleavePredictionIsWrong": {
        '=cleave_operator_prediction_holds{deployment="default/chat",model="m"}': 0
    },
}
TOGETHER = {
    "CleaveSloBurnsFast": {"CleaveSloBurns"},
    "CleaveManyRequestsFail": {"CleaveRequestsFail"},
    "CleaveFleetIsGone": {"CleaveRequestsFail"},
}
"""Alerts that come with another."""


@pytest.fixture(scope="module")
def rules(render) -> list[dict[str, Any]]:
    (found,) = [
        each for each in render("metrics.rules.enabled=true") if each["kind"] == "PrometheusRule"
    ]
    return [rule for group in found["spec"]["groups"] for rule in group["rules"]]


@pytest.fixture(scope="module")
def program() -> str:
    found = subprocess.run(
        [ROOT / "scripts" / "promql", "--built"], capture_output=True, text=True, check=False
    )
    if found.returncode:
        pytest.skip("Prometheus' query engine is not here; scripts/promql builds it")
    return found.stdout.strip()


def scrape(series: Series) -> list[dict[str, Any]]:
    """Some hours of pages."""
    pages = []
    for step in range(HOURS * 60 + 1):
        is_late = step > HOURS * 60 - GONE_STEPS
        lines = (
            f"{name.removeprefix('=')} {show(name, value, step)}"
            for name, value in series.items()
            if value is not None or not is_late
        )
        labels = {"namespace": "llm", "pod": "gateway-0", "instance": "a"}
        at = float(step * STEP_S)
        pages.append({"at": at, "labels": labels, "text": "\n".join(lines) + "\n"})
    return pages


def show(name: str, value: float | None, step: int) -> str:
    """What a page says of a series."""
    if value is None:
        return "2"
    return f"{value if name.startswith('=') else value * step:g}"


def find_firing(program: str, rules: list[dict[str, Any]], series: Series) -> set[str]:
    records = {rule["record"]: f"({rule['expr']})" for rule in rules if "record" in rule}
    alerts = {rule["alert"]: rule["expr"] for rule in rules if "alert" in rule}
    name = re.compile("|".join(map(re.escape, sorted(records, key=len, reverse=True))))
    queries = [name.sub(lambda m: records[m[0]], expr) for expr in alerts.values()]
    request = {"pages": scrape(series), "queries": queries, "at": HOURS * 3600.0}
    completed = subprocess.run(
        [program], input=json.dumps(request), capture_output=True, text=True, check=True
    )
    answers = dict(zip(alerts, json.loads(completed.stdout), strict=True))
    faults = {alert: answer["error"] for alert, answer in answers.items() if "error" in answer}
    assert not faults
    return {alert for alert, answer in answers.items() if answer["samples"]}


def test_no_alert_fires_while_all_is_well(program, rules) -> None:
    assert find_firing(program, rules, WELL) == set()


def test_each_alert_has_a_case_that_it_is_for(rules) -> None:
    assert {rule["alert"] for rule in rules if "alert" in rule} == ILL.keys()


@pytest.mark.parametrize("alert", ILL)
def test_it_fires_when_what_it_is_for_happens(program, rules, alert: str) -> None:
    fired = find_firing(program, rules, WELL | ILL[alert])
    assert fired == {alert} | TOGETHER.get(alert, set())


@pytest.mark.parametrize(
    "lost", ['cleave_kv_lost_total{reason="peer_lost"}', "vllm:nixl_num_failed_transfers_total"]
)
def test_kv_that_engines_lose_fires_though_every_hand_off_was_used(program, rules, lost) -> None:
    assert find_firing(program, rules, WELL | {lost: 20}) == {"CleaveHandoffsFail"}


def test_operators_that_are_all_gone_are_noticed(program, rules) -> None:
    gone = {name: value for name, value in WELL.items() if "operator" not in name}
    assert "CleaveOperatorDoesNotLead" in find_firing(program, rules, gone)


def count_hits(sent: int, predicted: tuple[int, int], engine: tuple[int, int] | None) -> Series:
    """(prompt tokens, those cached) by source."""
    name = 'cleave_gateway_cache_{}_tokens_total{{model="m",engine="a",source="{}"}}'
    by_source = {"predicted": predicted, "engine": engine or (None, None)}
    return {name.format("prompt", "sent"): sent} | {
        name.format(kind, source): count
        for source, counts in by_source.items()
        for kind, count in zip(("prompt", "hit"), counts, strict=True)
    }


@pytest.mark.parametrize(
    ("sent", "predicted", "engine", "fires"),
    [
        (50_000, (50_000, 20_000), (50_000, 0), True),  # without prefix cache
        (50_000, (50_000, 20_000), (50_000, 14_000), True),
        (50_000, (50_000, 20_000), (50_000, 16_000), False),
        (50_000, (50_000, 20_000), (60_000, 40_000), False),  # more than predicted
        (50_000, (20_000, 1_000), (50_000, 45_000), False),  # short prompts that begin alike
        (50_000, (20_000, 12_000), (50_000, 4_000), True),  # even if all hits were of long ones
        (50_000, (5_000, 4_000), (50_000, 0), False),  # too few
        (50_000, (50_000, 20_000), None, False),  # not reported
    ],
)
def test_caches_that_have_less_than_predicted_are_noticed(
    program, rules, sent, predicted, engine, fires
) -> None:
    fired = find_firing(program, rules, WELL | count_hits(sent, predicted, engine))
    assert fired == ({"CleaveCachesAreNotAsPredicted"} if fires else set())


def test_a_fleet_scaled_to_zero_raises_no_alert(program, rules) -> None:
    gone = {name: value for name, value in ILL["CleaveFleetIsGone"].items() if value is None}
    assert find_firing(program, rules, WELL | gone) == set()


def test_a_fleet_that_refuses_requests_is_none_that_is_gone(program, rules) -> None:
    refused: Series = {'cleave_gateway_requests_total{model="m",outcome="unavailable"}': 1}
    assert find_firing(program, rules, WELL | refused) == {"CleaveRequestsFail"}


def test_failed_requests_wake_people_only_where_many_fail(program, rules) -> None:
    severities = {rule["alert"]: rule["labels"]["severity"] for rule in rules if "alert" in rule}
    assert severities["CleaveManyRequestsFail"] == "critical"
    assert severities["CleaveRequestsFail"] == "warning"

    def fire(ok: float, **outcomes: float) -> set[str]:
        name = 'cleave_gateway_requests_total{{model="m",outcome="{}"}}'
        counts = {"ok": ok, **outcomes}
        series: Series = {name.format(outcome): count for outcome, count in counts.items()}
        return find_firing(program, rules, WELL | series)

    assert fire(600, broken=0.5) == set(), "fewer than may fail"
    assert fire(600, refused=90, cancelled=90, shed=90) == set(), "clients and limits"
    assert fire(1, failed=0.1) == {"CleaveRequestsFail"}, "six in an hour of little traffic"
    assert fire(0, unavailable=5) == {"CleaveRequestsFail", "CleaveManyRequestsFail"}


def test_dashboards_and_rules_name_only_metrics_that_there_are(rules) -> None:
    known = {*re.findall(r"`(cleave_\w+)`", (ROOT / "docs/reference/metrics.md").read_text())}
    files = (ROOT / "charts" / "cleave" / "files" / "dashboards").glob("*.json")
    text = "\n".join([*(file.read_text() for file in files), *(rule["expr"] for rule in rules)])
    named = {*re.findall(r"\bcleave_(?:gateway|operator)_\w+", text)}
    assert len(named) > 20
    assert {re.sub("_bucket$", "", name) for name in named} <= known


def test_the_attainment_target_comes_from_the_values(render) -> None:
    values = "metrics.rules.enabled=true", "metrics.rules.attainment=0.99"
    (rule,) = [each for each in render(*values) if each["kind"] == "PrometheusRule"]
    assert "3 * (1 - 0.99)" in rule["spec"]["groups"][0]["rules"][5]["expr"]


def test_dashboards_come_as_config_maps_for_grafanas_sidecar(render) -> None:
    maps = [
        each
        for each in render("metrics.dashboards.enabled=true")
        if each["metadata"].get("labels", {}).get("grafana_dashboard") == "1"
    ]
    titles = {json.loads(text)["title"] for each in maps for text in each["data"].values()}
    assert titles == {"Cleave / Serving", "Cleave / Pools and KV", "Cleave / Control plane"}
