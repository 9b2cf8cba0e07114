"""What Prometheus learns of plans that follow traffic."""

from collections import defaultdict

from cleave.controller.metrics import OperatorCollector, OperatorMetrics, collect_plan_metrics
from cleave.manifests.labels import Manifest


def series(status: Manifest) -> dict[str, dict[tuple[str, ...], float]]:
    """Values by metric and by labels but for those that say whose they are."""
    found: dict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
    for family in collect_plan_metrics({"default/chat": {"model": "m", **status}}):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("deployment"), labels.pop("model")) == ("default/chat", "m")
            found[sample.name.removeprefix("cleave_operator_")][*labels.values()] = sample.value
    return found


def condition(kind: str, status: str) -> Manifest:
    return {"type": kind, "status": status, "reason": "X"}


def test_predictions_stand_beside_what_was_seen() -> None:
    exported = series(
        {
            "observed": {"attainment": 0.7, "ttftMs": {"p50": 200, "p90": 500, "p99": 900}},
            "prediction": {"attainment": 0.9, "ttftMs": {"p50": 100, "p90": 250}, "error": 1.0},
        }
    )
    assert exported["attainment"] == {("predicted",): 0.9, ("observed",): 0.7}
    assert exported["latency_seconds"] == {
        ("ttft", "0.5", "predicted"): 0.1,
        ("ttft", "0.9", "predicted"): 0.25,
        ("ttft", "0.5", "observed"): 0.2,
        ("ttft", "0.9", "observed"): 0.5,
    }
    assert exported["prediction_error"] == {(): 1.0}


def test_conditions_and_corrections_are_numbers() -> None:
    conditions = [condition("PlanDrifted", "True"), condition("PredictionHolds", "False")]
    conditions.append(condition("KVRateAsPlanned", "True"))
    exported = series({"conditions": conditions, "correction": {"prefill": 1.5}})
    assert exported["plan_drifted"] == {(): 1}
    assert exported["prediction_holds"] == {(): 0}
    assert exported["kv_rate_as_planned"] == {(): 1}
    assert exported["correction"] == {("prefill",): 1.5, ("decode",): 1.0}


def test_results_of_the_planner_are_counted_from_zero() -> None:
    metrics = OperatorMetrics()
    metrics.plans["apply",] += 1
    collector = OperatorCollector(metrics, queued=int, objects=dict, is_leading=bool, statuses=dict)
    (plans,) = (each for each in collector.collect() if each.name == "cleave_operator_plans")
    assert {each.labels["result"]: each.value for each in plans.samples} == {
        **dict.fromkeys(("planned", "infeasible", "failed", "keep", "correct", "propose"), 0),
        "apply": 1,
    }


def test_what_is_not_known_has_no_series() -> None:
    assert series({"conditions": [condition("PlanDrifted", "Unknown")]}).keys() <= {"correction"}
    assert not series({})
