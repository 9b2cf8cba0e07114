"""Reconcile of a deployment: exact actions."""

import cProfile
import pstats
from dataclasses import replace
from typing import Any

import pytest

from cleave.api.deployment import LLMDeployment
from cleave.api.enums import FallbackPolicy
from cleave.api.pool import InstancePool, ReplicasOwner
from cleave.api.role import Role
from cleave.controller.cluster.actions import (
    Action,
    Apply,
    Delete,
    Emit,
    PatchStatus,
    RequestPlan,
    SetFinalizers,
)
from cleave.controller.cluster.inventory import build_inventory
from cleave.controller.cluster.objects import ObservedChild, ObservedNode, ObservedPod, parse_child
from cleave.controller.deployment.reconcile import reconcile
from cleave.controller.settings import OperatorSettings
from cleave.controller.views import DeploymentView
from cleave.manifests.credentials import name_accounts
from cleave.manifests.labels import Manifest
from cleave.manifests.network_policies import NetworkIsolation
from cleave.planner.resolved_deployment import resolve_in_cluster
from cleave.rpc.fleet_status import FleetInstance, KvPath
from cleave.rpc.plan_thresholds import PlanThresholds, parse_thresholds

from tests.support import deployment_views as planned
from tests.support.fake_cluster import chat, manual_placement

NOW_S = 1_000_000.0
FIXED = [
    *(name for name in name_accounts("llm", "chat", "u1").names for _ in range(3)),
    *("chat-workers", "chat", "chat-gateway", "chat-gateway"),
]


def deployment(deleted: str = "", finalizers: tuple[str, ...] = ("cleave.dev/drain",), **spec: Any):
    resource = chat(**{"placement": manual_placement(prefill=1, decode=2), **spec})
    meta = {**resource["metadata"], "uid": "u1", "resourceVersion": "7", "generation": 2}
    meta["finalizers"] = list(finalizers)
    if deleted:
        meta["deletionTimestamp"] = deleted
    return LLMDeployment.model_validate({**resource, "metadata": meta})


def view(desired: LLMDeployment, **fields: Any) -> DeploymentView:
    children = planned.own_accounts(desired)
    return DeploymentView(
        resolve_in_cluster(desired), build_inventory([]), NOW_S, **{"children": children, **fields}
    )


def names(actions: list[Action], kind: str = "") -> list[str]:
    return [
        each.manifest["metadata"]["name"]
        for each in actions
        if isinstance(each, Apply) and kind in ("", each.manifest["kind"])
    ]


def pool(manifest: Manifest, **spec: Any) -> InstancePool:
    meta = {**manifest["metadata"], "uid": f"p-{manifest['metadata']['name']}"}
    meta |= {"resourceVersion": "9"}
    whole = {**manifest, "metadata": meta, "spec": {**manifest["spec"], **spec}}
    return InstancePool.model_validate(whole)


def build_pools(desired: LLMDeployment, **spec: Any) -> tuple[InstancePool, ...]:
    applied = [e.manifest for e in reconcile(view(desired)) if isinstance(e, Apply)]
    return tuple(pool(each, **spec) for each in applied if each["kind"] == "InstancePool")


def pods(pools: tuple[InstancePool, ...], ready: bool = True) -> tuple[ObservedPod, ...]:
    return tuple(
        ObservedPod(
            name=f"{each.name}-{number}",
            uid=f"i-{each.name}-{number}",
            role=each.spec.role,
            revision=each.spec.revision,
            ready=ready,
            pool=each.name,
        )
        for each in pools
        for number in range(each.spec.replicas)
    )


def status_of(actions: list[Action]) -> Manifest:
    (written,) = [each.status for each in actions if isinstance(each, PatchStatus)]
    return written


def condition(actions: list[Action], kind: str) -> tuple[str, str]:
    found = next(c for c in status_of(actions)["conditions"] if c["type"] == kind)
    return found["status"], found["reason"]


def message(actions: list[Action], kind: str) -> str:
    return next(c["message"] for c in status_of(actions)["conditions"] if c["type"] == kind)


def rollouts(actions: list[Action]) -> dict[str, dict[str, int] | None]:
    applied = [e.manifest for e in actions if isinstance(e, Apply)]
    return {
        each["metadata"]["name"]: each["spec"].get("rollout")
        for each in applied
        if each["kind"] == "InstancePool"
    }


def test_a_deployment_gets_its_finalizer_first() -> None:
    action, *_ = reconcile(view(deployment(finalizers=())))
    assert isinstance(action, SetFinalizers)
    assert action.finalizers == ("cleave.dev/drain",)


def test_everything_is_created_in_one_pass_after_the_status() -> None:
    actions = reconcile(view(deployment()))
    assert isinstance(actions[0], PatchStatus)
    assert names(actions) == [*FIXED, "chat-prefill", "chat-decode"]
    assert all(
        each.manifest["metadata"]["ownerReferences"][0]["uid"] == "u1"
        for each in actions
        if isinstance(each, Apply)
    )
    assert rollouts(actions) == {"chat-prefill": None, "chat-decode": None}


@pytest.mark.parametrize("engine", ["Emulated", "vLLM"])
def test_a_reconcile_of_a_placement_by_hand_derives_nothing_anew(engine: str) -> None:
    here = view(deployment(engine={"type": engine}, model={"source": "Qwen/Qwen3-8B"}))
    reconcile(here)
    with cProfile.Profile() as profile:
        reconcile(here)
    calls = pstats.Stats(profile)
    assert calls.total_calls < 2_000  # type: ignore[attr-defined]
    names = {name for _, _, name in calls.stats}  # type: ignore[attr-defined]
    assert not names & {"load_known_shape", "choose_connector", "list_start_faults"}


def test_an_applied_object_is_not_written_again() -> None:
    desired = deployment()
    first = reconcile(view(desired))
    children = {
        (m["kind"], m["metadata"]["name"]): parse_child(m)
        for m in (e.manifest for e in first if isinstance(e, Apply))
        if m["kind"] != "InstancePool"
    }
    pools = build_pools(desired)
    here = view(desired, children=children, pools=pools, status=status_of(first))
    again = reconcile(here)
    assert {type(each) for each in again} <= {PatchStatus, Emit}
    gateway = children["Deployment", "chat-gateway"]
    other = {**children, ("Deployment", "chat-gateway"): replace(gateway, applied="other")}
    assert names(reconcile(replace(here, children=other))) == ["chat-gateway"]


@pytest.mark.parametrize(
    ("kind", "field", "edited"),
    [
        ("RoleBinding", "subjects", [{"kind": "Group", "name": "system:authenticated"}]),
        ("Role", "rules", [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}]),
        ("NetworkPolicy", "spec", {"podSelector": {}, "ingress": [{}]}),
    ],
)
def test_access_that_was_opened_by_hand_is_closed_again(kind: str, field: str, edited: Any) -> None:
    settings = OperatorSettings(isolation=NetworkIsolation())
    here = replace(view(deployment()), settings=settings)
    applied = [each.manifest for each in reconcile(here) if isinstance(each, Apply)]
    children = {(m["kind"], m["metadata"]["name"]): parse_child(m) for m in applied}
    assert not [
        each
        for each in reconcile(replace(here, children=children))
        if isinstance(each, Apply) and each.manifest["kind"] == kind
    ]
    theirs = next(each for each in applied if each["kind"] == kind)
    children[kind, theirs["metadata"]["name"]] = parse_child({**theirs, field: edited})
    names_again = names(reconcile(replace(here, children=children)))
    assert theirs["metadata"]["name"] in names_again


def test_nothing_with_pods_comes_before_the_accounts() -> None:
    desired = deployment()
    own = planned.own_accounts(desired)
    (gateways, workers) = own
    leaving = {**own, workers: replace(own[workers], deleting=True)}
    for children in ({}, {gateways: own[gateways]}, leaving):
        applied = [e for e in reconcile(view(desired, children=children)) if isinstance(e, Apply)]
        assert {each.manifest["kind"] for each in applied} <= {"ServiceAccount"}
    kinds = {e.manifest["kind"] for e in reconcile(view(desired)) if isinstance(e, Apply)}
    assert {"Deployment", "InstancePool"} <= kinds


def test_another_threshold_of_the_plan_changes_a_label_and_starts_nothing_again() -> None:
    desired = planned.deployment(engine={"connector": "Cleave", "transfer": "Auto"})
    status = planned.status(desired)
    first = reconcile(planned.view(desired, status))
    applied = [each.manifest for each in first if isinstance(each, Apply)]
    children = {(m["kind"], m["metadata"]["name"]): parse_child(m) for m in applied}
    settled = planned.view(desired, status, children=children)
    assert names(reconcile(settled)) == []
    changed = {**status["plan"], "wholeBelowTokens": 256, "aheadFromTokens": 512}
    (service,) = (
        each.manifest
        for each in reconcile(replace(settled, status={**status, "plan": changed}))
        if isinstance(each, Apply)
    )
    assert (service["kind"], service["metadata"]["name"]) == ("Service", "chat-workers")
    labels = service["metadata"]["labels"]
    assert parse_thresholds(labels) == PlanThresholds(256, 512)


def test_a_plan_that_cannot_be_read_has_no_thresholds() -> None:
    """A later version wrote it, before a roll-back."""
    desired = planned.deployment()
    before = planned.status(desired)
    unreadable = {**before["plan"], "inputs": "of-another", "wholeBelowTokens": "many"}
    here = replace(planned.view(desired, before), status={**before, "plan": unreadable})
    (service,) = (
        each.manifest
        for each in reconcile(here)
        if isinstance(each, Apply)
        and each.manifest["metadata"]["name"] == "chat-workers"
        and each.manifest["kind"] == "Service"
    )
    assert parse_thresholds(service["metadata"]["labels"]) == PlanThresholds()


def test_a_new_revision_moves_all_roles_together() -> None:
    before = deployment()
    pools = build_pools(before)
    after = deployment(engine={"type": "Emulated", "args": ["--seed", "1"]})
    actions = reconcile(view(after, pools=pools, pods=pods(pools)))
    steps = rollouts(actions)
    assert set(steps) == {"chat-prefill", "chat-decode"}
    old = pools[0].spec.revision
    assert steps["chat-prefill"] == {"new": 1, "old": 1, "older": {old: 1}}
    assert steps["chat-decode"] == {"new": 1, "old": 2, "older": {old: 2}}
    assert condition(actions, "Progressing") == ("True", "RollingOut")


def test_old_instances_that_fail_go_at_once_and_count_as_leaving() -> None:
    pools = build_pools(deployment())
    after = deployment(engine={"type": "Emulated", "args": ["--seed", "1"]})
    (prefill, *decode) = pods(pools, ready=False)
    failing = replace(prefill, start_fault="ErrImagePull: no such image")
    actions = reconcile(view(after, pools=pools, pods=(failing, *decode)))
    steps, old = rollouts(actions), pools[0].spec.revision
    assert steps["chat-prefill"] == {"new": 1, "old": 0}
    # Those that load may get there.
    assert steps["chat-decode"] == {"new": 1, "old": 2, "older": {old: 2}}


def test_a_number_that_is_another_owners_stays() -> None:
    desired = deployment()
    pools = build_pools(desired, owner="Autoscaler", replicas=9)
    after = deployment(engine={"type": "Emulated", "args": ["--seed", "1"]})
    for actions in (
        reconcile(view(desired, pools=pools, pods=pods(pools))),
        reconcile(view(after, pools=pools, pods=pods(pools))),
    ):
        for each in actions:
            if isinstance(each, Apply) and each.manifest["kind"] == "InstancePool":
                assert each.manifest["spec"]["replicas"] == 9
                assert each.manifest["spec"]["owner"] == "Autoscaler"
                # Whoever owns it may have changed it just now.
                assert each.manifest["metadata"]["resourceVersion"] == "9"


def test_the_plans_number_is_put_right() -> None:
    desired = deployment()
    pools = build_pools(desired)
    other = tuple(
        each.model_copy(update={"spec": each.spec.model_copy(update={"replicas": 7})})
        for each in pools
    )
    actions = reconcile(view(desired, pools=other))
    assert names(actions, "InstancePool") == ["chat-prefill", "chat-decode"]


def set_back(actions: list[Action]) -> list[Emit]:
    return [e for e in actions if isinstance(e, Emit) and e.reason == "ReplicasSetBack"]


def test_a_reverted_scale_of_a_planned_pool_is_explained() -> None:
    desired = deployment()
    pools = build_pools(desired)
    first = status_of(reconcile(view(desired)))
    decode = next(each for each in pools if each.spec.role is Role.DECODE)
    scaled = decode.model_copy(update={"spec": decode.spec.model_copy(update={"replicas": 7})})
    (reported,) = set_back(reconcile(view(desired, pools=(scaled,), status=first)))
    assert (reported.target.kind, reported.target.name) == ("InstancePool", "chat-decode")
    assert reported.message.startswith("replicas: 7 set back to 2, the plan's number")
    # A plan that has changed is no user error.
    more = deployment(placement=manual_placement(prefill=1, decode=3))
    assert not set_back(reconcile(view(more, pools=pools, status=first)))


def test_cells_that_fit_a_node_are_one_pool_whose_number_is_that_of_cells() -> None:
    manual = [{"role": "prefill", "replicas": 2, "perCell": 1},
              {"role": "decode", "replicas": 4, "perCell": 2}]  # fmt: skip
    desired = deployment(placement={"manual": manual})
    nodes = build_inventory([ObservedNode("n", True, True, gpu="H100", num_gpus=8)])
    here = replace(view(desired), inventory=nodes)
    first = reconcile(here)
    (manifest,) = (
        e.manifest for e in first if isinstance(e, Apply) and e.manifest["kind"] == "InstancePool"
    )
    assert (manifest["metadata"]["name"], manifest["spec"]["replicas"]) == ("chat-mixed", 2)
    scaled = replace(here, pools=(pool(manifest, replicas=5),), status=status_of(first))
    (reported,) = set_back(reconcile(scaled))
    assert reported.message.startswith("replicas: 5 set back to 2, the plan's number")
    # Pods of before are kept until cells are there, and no user has scaled the dropped pools.
    before = replace(here, pools=build_pools(desired), pods=pods(build_pools(desired)))
    actions = reconcile(replace(before, status=status_of(first)))
    assert names(actions, "InstancePool") == ["chat-mixed", "chat-prefill", "chat-decode"]
    unchanged = rollouts(actions)["chat-decode"]
    assert unchanged is not None
    assert unchanged["new"] == 4
    assert not set_back(actions)


def test_a_dropped_role_is_emptied_and_then_deleted() -> None:
    before = build_pools(deployment())
    desired = deployment(placement=manual_placement(mixed=2))
    actions = reconcile(view(desired, pools=before, pods=pods(before)))
    assert names(actions, "InstancePool") == ["chat-mixed", "chat-prefill", "chat-decode"]
    unchanged = rollouts(actions)
    assert unchanged["chat-prefill"] is not None
    assert unchanged["chat-prefill"]["new"] == 1
    assert not [each for each in actions if isinstance(each, Delete)]
    empty = reconcile(view(desired, pools=before))
    assert [each.target.name for each in empty if isinstance(each, Delete)] == [
        "chat-prefill",
        "chat-decode",
    ]


def test_pools_go_first_and_the_deployment_when_they_have() -> None:
    pools = build_pools(deployment())
    desired = deployment(deleted="1970-01-12T13:46:40Z")
    actions = reconcile(view(desired, pools=pools))
    deleted = [each.target.name for each in actions if isinstance(each, Delete)]
    assert deleted == ["chat-prefill", "chat-decode"]
    assert not any(isinstance(each, SetFinalizers) for each in actions)
    (last,) = reconcile(view(desired))
    assert isinstance(last, SetFinalizers)
    assert last.finalizers == ()


def test_while_paused_only_the_status_is_written() -> None:
    actions = reconcile(view(deployment(paused=True)))
    assert [each for each in actions if isinstance(each, Apply | RequestPlan)] == []
    assert condition(actions, "Progressing") == ("False", "Paused")


def test_it_serves_when_every_role_and_a_gateway_are_ready() -> None:
    desired = deployment()
    pools = build_pools(desired)
    gateway = ObservedChild("Deployment", "default", "chat-gateway", "g", "x", ready=1)
    existing = {("Deployment", "chat-gateway"): gateway}
    # Its present generation was rolled out before.
    status = {"rolledOutGeneration": 2}
    ready = view(desired, pools=pools, pods=pods(pools), children=existing, status=status)
    assert both(ready) == [("True", "Serving")] * 2
    assert both(replace(ready, children={})) == [("False", "GatewayNotReady")] * 2
    some = replace(ready, pods=ready.pods[:2])
    assert both(some) == [("True", "Serving")] * 2
    for each in (some, replace(some, status={})):
        # Whether or not its generation is rolled out.
        assert condition(reconcile(each), "Degraded") == ("True", "TooFew")
    none = replace(ready, pods=ready.pods[:1])
    assert both(none) == [("False", "DecodeNotReady")] * 2


def test_gateways_that_do_not_start_are_reported_with_the_cause() -> None:
    desired = deployment()
    pools = build_pools(desired)
    gateway = ObservedChild("Deployment", "default", "chat-gateway", "g", "x", ready=1)
    existing = {("Deployment", "chat-gateway"): gateway}
    here = view(desired, pools=pools, pods=pods(pools), children=existing)
    refused = replace(gateway, fault="exceeded quota: q")
    for each, cause in (
        (replace(here, gateway_fault="g-1: ErrImagePull: x"), "g-1: ErrImagePull: x"),
        (replace(here, children={("Deployment", "chat-gateway"): refused}), "exceeded quota: q"),
    ):
        actions = reconcile(each)
        assert condition(actions, "Degraded") == ("True", "NotStarting")
        assert message(actions, "Degraded") == f"gateway: {cause}"
        assert message(actions, "GatewayReady") == f"1 of 2 gateways are ready; {cause}"


def test_what_pods_wait_for_is_in_the_conditions_at_once() -> None:
    desired = deployment()
    pools = build_pools(desired)
    reason = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu"
    unplaced = [
        replace(pod, scheduled=False, phase="Pending", unschedulable_reason=reason)
        for pod in pods(pools, ready=False)
    ]
    actions = reconcile(
        view(desired, pools=pools, pods=unplaced, gateway_wait="g-1 has no node: 0/2 nodes")
    )
    name = min(pod.name for pod in unplaced if pod.role is Role.PREFILL)
    assert message(actions, "PrefillReady").endswith(f"; {name} has no node: {reason}")
    assert message(actions, "GatewayReady") == (
        "0 of 2 gateways are ready; g-1 has no node: 0/2 nodes"
    )
    assert condition(actions, "Degraded")[0] == "False"


def test_the_cause_of_an_engine_that_does_not_start_is_in_the_conditions() -> None:
    desired = deployment()
    pools = build_pools(desired)
    here = view(desired, pools=pools, pods=pods(pools, ready=False))
    first = FleetInstance("chat-prefill-0", reason="engine starts")
    starting = replace(here, instances={first.name: first})
    actions = reconcile(starting)
    said = "0 of 1 prefill instances are ready; chat-prefill-0: engine starts"
    assert message(actions, "PrefillReady") == said
    assert condition(actions, "Degraded") == ("False", "Complete")
    cause = "engine starts again: engine ended with status 1: no such model"
    failed = FleetInstance("chat-prefill-0", reason=cause, restarts=2)
    actions = reconcile(replace(here, instances={failed.name: failed}))
    assert condition(actions, "Degraded") == ("True", "EngineFailed")
    assert message(actions, "Degraded") == f"chat-prefill-0: {cause} (started again 2 times)"
    for kind in ("PrefillReady", "Available", "Ready"):
        assert f"chat-prefill-0: {cause}" in message(actions, kind)
    serving = replace(here, pods=pods(pools), instances={failed.name: failed})
    actions = reconcile(serving)
    assert condition(actions, "Degraded") == ("False", "Complete"), "it has started since"
    assert message(actions, "PrefillReady") == "1 of 1 prefill instances are ready"


def test_a_report_about_an_earlier_pod_of_the_name_explains_nothing() -> None:
    desired = deployment()
    pools = build_pools(desired)
    here = view(desired, pools=pools, pods=pods(pools, ready=False))
    failed = FleetInstance("chat-prefill-0", reason="no such model", restarts=5, report_age_s=20.0)
    for created_s, degraded in ((here.now_s - 60, "True"), (here.now_s - 10, "False")):
        new = tuple(replace(pod, created_s=created_s) for pod in here.pods)
        actions = reconcile(replace(here, pods=new, instances={failed.name: failed}))
        assert condition(actions, "Degraded")[0] == degraded
        assert ("no such model" in message(actions, "PrefillReady")) == (degraded == "True")


def both(here: DeploymentView) -> list[tuple[str, str]]:
    actions = reconcile(here)
    return [condition(actions, kind) for kind in ("Ready", "Available")]


def test_a_pair_of_different_revisions_serves_nothing() -> None:
    desired = deployment()
    pools = build_pools(desired)
    gateway = ObservedChild("Deployment", "default", "chat-gateway", "g", "x", ready=1)
    existing = {("Deployment", "chat-gateway"): gateway}
    prefill, *decode = pods(pools)
    mixed_up = (replace(prefill, revision="other"), *decode)
    here = view(desired, pools=pools, pods=mixed_up, children=existing)
    assert condition(reconcile(here), "Available") == ("False", "NoPairReady")
    one = replace(prefill, name="x", role=Role.MIXED)
    assert condition(reconcile(replace(here, pods=(*mixed_up, one))), "Available")[0] == "True"


def scaled(**counts: int) -> DeploymentView:
    """A deployment that was rolled out, and whose pools somebody has scaled since."""
    desired = deployment()
    pools = tuple(
        each.model_copy(
            update={
                "spec": each.spec.model_copy(
                    update={"replicas": counts[each.spec.role], "owner": ReplicasOwner.MANUAL}
                )
            }
        )
        for each in build_pools(desired)
    )
    gateway = ObservedChild("Deployment", "default", "chat-gateway", "g", "x", ready=2)
    existing = {("Deployment", "chat-gateway"): gateway}
    status = {"rolledOutGeneration": 2}
    return view(desired, pools=pools, pods=pods(pools), children=existing, status=status)


def test_a_role_that_is_scaled_to_zero_is_not_needed_where_the_other_may_do_both_phases() -> None:
    for here in (scaled(prefill=0, decode=2), scaled(prefill=1, decode=0)):
        assert both(here) == [("True", "Serving")] * 2
    alone = scaled(prefill=0, decode=2)
    assert both(replace(alone, pods=())) == [("False", "DecodeNotReady")] * 2
    never = alone.deployment.spec.routing.model_copy(update={"fallback": FallbackPolicy.NEVER})
    spec = alone.deployment.spec.model_copy(update={"routing": never})
    strict = alone.deployment.model_copy(update={"spec": spec})
    assert (
        both(replace(alone, resolved=resolve_in_cluster(strict)))
        == [("False", "PrefillNotReady")] * 2
    )


def test_another_revision_within_a_generation_that_was_rolled_out_leaves_it_ready() -> None:
    desired = deployment()
    pools = build_pools(desired)
    gateway = ObservedChild("Deployment", "default", "chat-gateway", "g", "x", ready=2)
    old = tuple(replace(pod, revision="older") for pod in pods(pools))
    here = view(desired, pools=pools, pods=old, children={("Deployment", "chat-gateway"): gateway})
    assert condition(reconcile(here), "Ready") == ("False", "RollingOut")
    before = replace(here, status={"rolledOutGeneration": 2})
    assert condition(reconcile(before), "Ready") == ("True", "Serving")
    assert condition(reconcile(before), "Progressing") == ("True", "RollingOut")


def test_the_kv_path_is_what_the_gateways_say() -> None:
    desired = deployment()
    pools = build_pools(desired)
    here = view(desired, pools=pools, pods=pods(pools))
    assert condition(reconcile(here), "KVPathVerified") == ("Unknown", "NotReported")
    good = KvPath(verified=True, transport="nixl over tcp", detail="p -> d: 1.2 MB for 9 tokens")
    known = {each.name: FleetInstance(each.name, kv_path=good) for each in here.pods}
    reported = reconcile(replace(here, instances=known))
    assert condition(reported, "KVPathVerified") == ("True", "Verified")
    message = next(c for c in status_of(reported)["conditions"] if c["type"] == "KVPathVerified")
    assert "nixl over tcp, p -> d: 1.2 MB for 9 tokens" in message["message"]
    bad = {**known, here.pods[0].name: FleetInstance(here.pods[0].name)}
    assert condition(reconcile(replace(here, instances=bad)), "KVPathVerified")[0] == "False"


def test_what_its_pools_say_is_passed_on() -> None:
    desired = deployment()
    limited = {
        "type": "ScalingLimited",
        "status": "True",
        "reason": "Unschedulable",
        "message": "no",
    }
    here = view(desired, pool_status={Role.DECODE: {"conditions": [limited]}})
    assert condition(reconcile(here), "ScalingLimited") == ("True", "Unschedulable")


@pytest.mark.parametrize(("image", "is_said"), [(None, True), ("own:1", False)])
def test_nodes_that_cannot_run_cleaves_image_are_said(image: str | None, is_said: bool) -> None:
    fault = "has driver 570, and CUDA 13 needs 580 or newer"
    nodes = [ObservedNode("n1", True, True, gpu="H100", num_gpus=8, fault=fault)]
    engine = {"image": image} if image else {}
    here = replace(
        view(deployment(engine=engine)), inventory=build_inventory(nodes, needs_own_image=is_said)
    )
    found = status_of(reconcile(here))["conditions"]
    (limited,) = [each for each in found if each["type"] == "ScalingLimited"]
    assert limited["status"] == "False"
    more = f"; left out of plans: n1: {fault}" if is_said else ""
    assert limited["message"] == f"no instance lacks room{more}"


def test_a_fault_is_reported() -> None:
    assert condition(reconcile(view(deployment(), fault="quota")), "Degraded") == ("True", "Failed")


def test_a_model_that_the_planner_does_not_know_is_deployed_and_the_condition_says_how() -> None:
    workload = {"rate": 1, "promptTokens": {"mean": 100}, "outputTokens": {"mean": 10}}
    desired = deployment(
        placement=None, model="example/unknown-9b", engine={"type": "vLLM"}, workload=workload
    )
    actions = reconcile(view(desired))
    assert names(actions, "InstancePool") == ["chat-prefill", "chat-decode"]
    assert not [each for each in actions if isinstance(each, RequestPlan)]
    (patch,) = (each for each in actions if isinstance(each, PatchStatus))
    said = next(each for each in patch.status["conditions"] if each["type"] == "PlanReady")
    assert (said["status"], said["reason"]) == ("False", "ModelUnknown")
    assert "nothing is planned" in said["message"]
    assert len(said["message"]) < 1024
