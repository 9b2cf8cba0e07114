"""The only instance of a pool on a node that is drained: exact actions, step by step."""

from dataclasses import replace
from typing import Any

import pytest

from cleave.controller.cluster.actions import Action, Apply, PatchStatus
from cleave.controller.cluster.objects import ObservedNode, ObservedPod
from cleave.controller.pool.reconcile import reconcile
from cleave.controller.views import PoolView

from tests.controller.pool.test_reconcile import NOW_S, pod, pods_only, pool

NODES = {
    "n1": ObservedNode("n1", ready=True, schedulable=False),
    "n2": ObservedNode("n2", ready=True, schedulable=True),
}
NO_ROOM = "0/2 nodes are available: 1 Insufficient cpu, 1 node(s) were unschedulable."


def decide(*pods: ObservedPod, **spec: Any) -> list[Action]:
    desired = pool(**{"replicas": 1, **spec})
    return reconcile(PoolView(desired, NOW_S, pods=pods, nodes=NODES))


def get_budget(actions: list[Action]) -> int:
    (budget,) = [
        each.manifest
        for each in actions
        if isinstance(each, Apply) and each.manifest["kind"] == "PodDisruptionBudget"
    ]
    return budget["spec"]["minAvailable"]


def get_limit(actions: list[Action]) -> str:
    (status,) = [each.status for each in actions if isinstance(each, PatchStatus)]
    conditions = {each["type"]: each for each in status["conditions"]}
    return conditions["ScalingLimited"].get("message", "")


@pytest.fixture
def only() -> ObservedPod:
    return pod("only", pool(replicas=1))


def test_the_last_instance_is_kept_before_any_node_is_drained(only) -> None:
    actions = decide(replace(only, node="n2"))
    assert pods_only(actions) == []
    assert get_budget(actions) == 1


def test_the_replacement_comes_first_and_the_instance_goes_when_it_is_ready(only) -> None:
    ((verb, created),) = pods_only(actions := decide(only))
    assert verb == "create"
    assert get_budget(actions) == 1
    starting = replace(only, name=created, uid="u2", instance=created, node="n2", ready=False)
    assert pods_only(decide(only, starting)) == []
    actions = decide(only, replace(starting, ready=True))
    assert pods_only(actions) == [("delete", "only")]
    drained = replace(only, deleting=True, deleted_s=NOW_S + 600)
    assert pods_only(decide(drained, replace(starting, ready=True))) == []


def test_a_busy_instance_goes_although_its_replacement_has_no_load(only) -> None:
    busy = replace(only, load=9.0)
    idle = replace(only, name="new", uid="u2", instance="new", node="n2", load=0.0)
    assert pods_only(decide(busy, idle)) == [("delete", "only")]


def test_without_room_the_drain_goes_on_and_the_condition_says_what_that_means(only) -> None:
    pending = replace(
        *(only,), name="new", uid="u2", instance="new", node="", ready=False, scheduled=False,
        phase="Pending", unschedulable_reason=NO_ROOM, created_s=NOW_S - 60,
    )  # fmt: skip
    assert get_budget(decide(only, pending)) == 1
    overdue = replace(pending, created_s=NOW_S - 300)
    actions = decide(only, overdue)
    assert get_budget(actions) == 0
    assert pods_only(actions) == [("delete", "new")]
    message = get_limit(actions)
    assert message.startswith("the only instance may be evicted from the cordoned node n1")
    assert "room for 1 of 2 instances: 0/2 nodes are available: 1 Insufficient cpu" in message


@pytest.mark.parametrize("rollout", [{"new": 1, "old": 1}, None])
def test_a_drain_does_not_wait_for_a_rollout_without_room(only, rollout) -> None:
    old = replace(only, template="old", revision="old")
    new = replace(
        *(only,), name="new", uid="u2", instance="new", node="", ready=False, scheduled=False,
        phase="Pending", unschedulable_reason=NO_ROOM, created_s=NOW_S - 60,
    )  # fmt: skip
    assert get_budget(decide(old, new, rollout=rollout)) == 1
    overdue = replace(new, created_s=NOW_S - 300)
    assert get_budget(decide(old, overdue, rollout=rollout)) == 0


def test_an_instance_that_does_not_serve_is_not_moved(only) -> None:
    assert pods_only(decide(replace(only, ready=False))) == []


@pytest.mark.parametrize(
    "spec",
    [
        {"replicas": 2},
        {"nodes": 2, "parallelism": {"tensor": 2}},
        {"rollout": {"new": 1, "old": 1}},
    ],
)
def test_other_pools_create_nothing_for_a_cordoned_node(only, spec) -> None:
    desired = pool(**{"replicas": 1, **spec})
    pods = [replace(pod(name, desired), name=name) for name in ("a", "b")[: desired.spec.replicas]]
    actions = reconcile(PoolView(desired, NOW_S, pods=tuple(pods), nodes=NODES))
    assert not [name for verb, name in pods_only(actions) if verb == "create" and "-" not in name]
    assert get_budget(actions) == (1 if spec != {"nodes": 2, "parallelism": {"tensor": 2}} else 0)
