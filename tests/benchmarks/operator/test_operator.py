"""What the benchmark of the operator makes of what it sees."""

from types import ModuleType

import pytest

from cleave.api.deployment import LLMDeployment

METRICS = """\
# HELP cleave_operator_reconciles_total Reconciles
cleave_operator_reconciles_total{kind="InstancePool",outcome="idle"} 5.0
cleave_operator_reconciles_total{kind="InstancePool",outcome="changed"} 2.0
cleave_operator_actions_total{action="Create",outcome="done"} 12.0
cleave_operator_actions_total{action="PatchStatus",outcome="done"} 3.0
cleave_operator_events_total{kind="Pod",type="ADDED"} 1e+03
cleave_operator_queue_depth 4.0
"""


def test_a_reading_adds_up_what_the_operator_counts(operator_process: ModuleType) -> None:
    reading = operator_process.parse(METRICS, cpu_s=2.5, at_s=10.0)
    assert reading == operator_process.Reading(10.0, 2.5, 1_000, 7, 5, 15, 4)
    before = operator_process.Reading(4.0, 1.0, 400, 2, 1, 5, 9)
    assert reading - before == operator_process.Reading(6.0, 1.5, 600, 5, 4, 10, 4)


@pytest.mark.parametrize(
    ("share", "value"), [(0.5, 5.0), (0.99, 10.0), (0.9, 9.0), (0.01, 1.0), (1.0, 10.0)]
)
def test_a_percentile_is_a_value_that_was_seen(
    trial: ModuleType, share: float, value: float
) -> None:
    values = [float(n) for n in range(10, 0, -1)]
    assert trial.find_percentile(values, share) == value


def test_what_is_applied_is_a_valid_deployment(trial: ModuleType) -> None:
    case = trial.Case("x", deployments=1, prefill=2, decode=8, limit_s=1)
    resource = LLMDeployment.model_validate(trial.manifest("chat-0", case))
    assert [(entry.role, entry.replicas) for entry in resource.spec.placement.manual] == [
        ("prefill", 2),
        ("decode", 8),
    ]
    assert case.pods == 10


def test_a_pod_counts_once_when_created_and_once_when_ready(trial: ModuleType) -> None:
    seen = trial.Sightings()
    meta = {"uid": "u", "labels": {"cleave.dev/deployment": "chat-0"}}
    new = {"metadata": meta}
    ready = {"metadata": meta, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    seen.listed([new])
    for pod in (new, ready, ready):
        seen.saw({"type": "MODIFIED", "object": pod})
    assert (seen.num_created, seen.num_ready) == (1, 1)
    assert len(seen.created["chat-0"]) == 1
