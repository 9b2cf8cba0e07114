"""What the benchmark of the operator makes of what it sees."""

from collections import Counter
from collections.abc import Callable
from types import ModuleType

import msgspec
import pytest

from cleave.api.deployment import LLMDeployment
from cleave.manifests.labels import COMPONENT, DEPLOYMENT, REVISION, ROLE, Manifest
from cleave.rpc.fleet_status import FleetStatus
from cleave.traffic.counters import parse_metrics_page

Load = Callable[[str], ModuleType]

METRICS = """\
# HELP cleave_operator_reconciles_total Reconciles
cleave_operator_reconciles_total{kind="InstancePool",outcome="idle"} 5.0
cleave_operator_reconciles_total{kind="InstancePool",outcome="changed"} 2.0
cleave_operator_actions_total{action="Create",outcome="done"} 12.0
cleave_operator_actions_total{action="PatchStatus",outcome="done"} 3.0
cleave_operator_events_total{kind="Pod",type="ADDED"} 1e+03
cleave_operator_queue_depth 4.0
"""

API_SERVER = """\
apiserver_request_total{code="200",dry_run="",resource="pods",verb="PATCH",version="v1"} 7
apiserver_request_total{code="409",dry_run="",resource="pods",verb="PATCH",version="v1"} 1
apiserver_request_total{code="200",dry_run="",resource="pods",verb="WATCH",version="v1"} 90
apiserver_flowcontrol_dispatched_requests_total{flow_schema="SCHEMA",priority_level="low"} 8
apiserver_flowcontrol_dispatched_requests_total{flow_schema="exempt",priority_level="exempt"} 5
apiserver_flowcontrol_nominal_limit_seats{priority_level="low"} 245
apiserver_flowcontrol_nominal_limit_seats{priority_level="exempt"} 0
apiserver_flowcontrol_rejected_requests_total{flow_schema="probes",reason="y"} 2
apiserver_flowcontrol_request_execution_seconds_sum{flow_schema="SCHEMA",type="regular"} 1.5
apiserver_flowcontrol_request_execution_seconds_sum{flow_schema="exempt",type="regular"} 9
apiserver_flowcontrol_request_wait_duration_seconds_sum{execute="true",flow_schema="SCHEMA"} 0.25
""".replace("SCHEMA", "service-accounts")

DEPLOYED = {DEPLOYMENT: "chat-0"}
READY = {"type": "Ready", "status": "True"}


def test_a_reading_adds_up_what_the_operator_counts(load: Load) -> None:
    operator_process = load("operator_process")
    reading = operator_process.parse(METRICS, cpu_s=2.5, at_s=10.0)
    assert reading == operator_process.Reading(10.0, 2.5, 1_000, 7, 5, 15, 4)
    before = operator_process.Reading(4.0, 1.0, 400, 2, 1, 5, 9)
    assert reading - before == operator_process.Reading(6.0, 1.5, 600, 5, 4, 10, 4)


def test_requests_are_counted_by_verb_and_client_without_watches(load: Load) -> None:
    reading = load("api_server").parse(API_SERVER, at_s=3.0)
    assert reading.verbs == Counter(PATCH=8)
    assert reading.clients == Counter({"service-accounts": 8, "exempt": 5})
    assert (reading.operator_seat_s, reading.operator_wait_s) == (1.5, 0.25)
    assert (reading.rejected, reading.operator_seats) == (2, 245)
    since = reading - load("api_server").parse(API_SERVER, at_s=1.0)
    assert (since.at_s, since.operator_seat_s, since.rejected) == (2.0, 0.0, 0)


@pytest.mark.parametrize(
    ("share", "value"), [(0.5, 5.0), (0.99, 10.0), (0.9, 9.0), (0.01, 1.0), (1.0, 10.0)]
)
def test_a_percentile_is_a_value_that_was_seen(load: Load, share: float, value: float) -> None:
    values = [float(n) for n in range(10, 0, -1)]
    assert load("sightings").find_percentile(values, share) == value


def test_what_is_applied_is_a_valid_deployment(load: Load) -> None:
    trial = load("trial")
    case = trial.Case("x", nodes=1, deployments=1, prefill=2, decode=8, limit_s=1)
    resource = LLMDeployment.model_validate(trial.manifest("chat-0", case))
    assert resource.spec.placement is not None
    assert [(entry.role, entry.replicas) for entry in resource.spec.placement.manual] == [
        ("prefill", 2),
        ("decode", 8),
    ]
    assert case.pods == 10


def test_a_pod_counts_once_for_each_stage(load: Load) -> None:
    sightings = load("sightings")
    seen = sightings.Sightings()
    new = build_pod("p")
    placed = {**new, "spec": {"nodeName": "n"}}
    ready = {**placed, "status": {"conditions": [READY]}}
    seen.listed([new])
    for pod in (new, placed, ready, ready):
        seen.saw({"type": "MODIFIED", "object": pod})
    assert [len(seen.times[stage]) for stage in sightings.Stage] == [1, 1, 1]
    seen.times[sightings.Stage.READY]["p"] = 12.0
    assert seen.compute_waits({"chat-0": 10.0})[sightings.Stage.READY] == sightings.Waits(2, 2, 2)


def test_a_bare_pod_depends_on_no_account(load: Load) -> None:
    pod = load("anchor").build_pod("bare-0")
    assert "serviceAccountName" not in pod["spec"]
    assert pod["metadata"]["namespace"] == "anchor"


def test_a_gateway_knows_the_ready_workers_of_its_deployment(load: Load) -> None:
    gateways = load("fake_gateways").FakeGateways()
    gateway = build_pod("g", **{COMPONENT: "gateway"}, ip="10.77.128.1")
    worker = build_pod("w", **{COMPONENT: "worker", ROLE: "decode", REVISION: "r"})
    ready = {**worker, "status": {"conditions": [READY]}}
    gateways.listed([gateway, worker])
    assert fetch_names(gateways) == []
    gateways.saw({"type": "MODIFIED", "object": ready})
    assert fetch_names(gateways) == ["w"]
    gateways.saw({"type": "DELETED", "object": ready})
    assert fetch_names(gateways) == []
    assert gateways.answer(b"/fleet", "10.77.128.2") == b""


def test_the_page_of_metrics_is_a_gateways(load: Load) -> None:
    page = load("fake_gateways").build_metrics_page()
    assert parse_metrics_page(page.decode(), 1.0).requests == 100


def fetch_names(gateways: object) -> list[str]:
    body = gateways.answer(b"/fleet", "10.77.128.1")  # type: ignore[attr-defined]
    return [each.name for each in msgspec.json.decode(body, type=FleetStatus).instances]


def build_pod(name: str, ip: str = "", **labels: str) -> Manifest:
    meta = {"uid": name, "name": name, "labels": {**DEPLOYED, **labels}}
    return {"metadata": meta, "spec": {}, "status": {"podIP": ip}}
