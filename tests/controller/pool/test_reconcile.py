"""Reconcile of one pool: exact actions."""

from dataclasses import replace
from typing import Any

import pytest

from cleave.api.pool import InstancePool
from cleave.api.role import Role
from cleave.controller.cluster import apply
from cleave.controller.cluster.actions import (
    Action,
    Apply,
    Create,
    Delete,
    PatchStatus,
    Requeue,
    SetFinalizers,
)
from cleave.controller.cluster.objects import ObservedChild, ObservedNode, ObservedPod
from cleave.controller.pool import pods as pool_pods
from cleave.controller.pool.reconcile import reconcile
from cleave.controller.settings import OperatorSettings
from cleave.controller.views import PoolView
from cleave.manifests.credentials import name_accounts
from cleave.manifests.network_policies import NetworkIsolation

NOW_S = 1_000_000.0


def pool(finalizers: tuple[str, ...] = ("cleave.dev/drain",), deleted: str = "", **spec: Any):
    meta = {"name": "chat-decode", "namespace": "llm", "uid": "p1", "resourceVersion": "7"}
    meta |= {"generation": 3, "finalizers": list(finalizers)}
    meta |= {"ownerReferences": [{"kind": "LLMDeployment", "name": "chat", "uid": "u1"}]}
    if deleted:
        meta["deletionTimestamp"] = deleted
    return InstancePool.model_validate(
        {
            "metadata": meta,
            "spec": {
                "deployment": "chat",
                "role": "decode",
                "replicas": 2,
                "revision": "new",
                "model": "org/model",
                "engine": {"type": "Emulated"},
                **spec,
            },
        }
    )


def pod(name: str, desired: InstancePool, **fields: Any) -> ObservedPod:
    observed = ObservedPod(
        name=name,
        uid=f"uid-{name}",
        role=Role.DECODE,
        revision="new",
        ready=True,
        namespace="llm",
        deployment="chat",
        pool="chat-decode",
        template=apply.hash_template(desired),
        node="n1",
        instance=name,
    )
    return replace(observed, **fields)


def test_the_config_of_a_model_replaces_no_pod() -> None:
    config = {"inline": {"num_hidden_layers": 2}}
    described = pool(model={"source": "org/model", "config": config})
    assert apply.hash_template(described) == apply.hash_template(
        pool(model={"source": "org/model"})
    )


def view(desired: InstancePool, *pods: ObservedPod, **fields: Any) -> PoolView:
    nodes = {"n1": ObservedNode("n1", ready=True, schedulable=True)}
    return PoolView(desired, NOW_S, pods=pods, nodes=nodes, **fields)


def pods_only(actions: list[Action]) -> list[tuple[str, str]]:
    return [
        ("create", each.manifest["metadata"]["name"]) if isinstance(each, Create)
        else ("delete", each.target.name)
        for each in actions
        if isinstance(each, Create | Delete)
    ]  # fmt: skip


def test_a_pool_gets_its_finalizer_first() -> None:
    action, *_ = reconcile(view(pool(finalizers=("other",))))
    assert isinstance(action, SetFinalizers)
    assert action.finalizers == ("other", "cleave.dev/drain")
    assert action.version == "7"


def test_missing_instances_are_created_with_names_derived_from_the_pool() -> None:
    desired = pool()
    first = pods_only(reconcile(view(desired)))
    assert [kind for kind, _ in first] == ["create", "create"]
    assert first == pods_only(reconcile(view(desired)))
    existing = pod(first[0][1], desired, ready=False)
    assert pods_only(reconcile(view(desired, existing))) == [first[1]]


def test_no_pod_is_created_before_its_account_is_the_deployments_own() -> None:
    """An account of another owner would give its rights to the pods."""
    for desired in (pool(), pool(nodes=2, parallelism={"tensor": 2})):
        actions = reconcile(view(desired, pod("x", desired), has_account=False))
        assert not [each for each in actions if isinstance(each, Create)]
        assert [each for each in actions if isinstance(each, Requeue)]


def test_pods_run_as_the_account_of_their_deployments_workers() -> None:
    created = [
        each.manifest
        for each in reconcile(view(pool(), deployment_uid="u1"))
        if isinstance(each, Create)
    ]
    accounts = {each["spec"]["serviceAccountName"] for each in created}
    assert accounts == {name_accounts("llm", "chat", "u1").workers}


def test_pods_have_the_pool_as_owner_and_the_template_hash() -> None:
    desired = pool()
    created = next(each for each in reconcile(view(desired)) if isinstance(each, Create))
    meta = created.manifest["metadata"]
    assert meta["ownerReferences"][0]["uid"] == "p1"
    assert meta["ownerReferences"][0]["controller"] is True
    assert meta["annotations"] == {"cleave.dev/template": apply.hash_template(desired)}


def test_too_many_instances_lose_the_emptiest() -> None:
    desired = pool(replicas=1)
    pods = [pod(name, desired, load=load) for name, load in (("a", 4.0), ("b", 1.0), ("c", 2.0))]
    assert pods_only(reconcile(view(desired, *pods))) == [("delete", "b"), ("delete", "c")]


def test_an_instance_that_goes_counts_no_more() -> None:
    desired = pool()
    going = pod("a", desired, deleting=True)
    assert len(pods_only(reconcile(view(desired, going, pod("b", desired))))) == 1


def test_a_pod_that_has_ended_is_replaced() -> None:
    desired = pool()
    done = pods_only(reconcile(view(desired, pod("a", desired, phase="Failed"), pod("b", desired))))
    assert done[0] == ("delete", "a")
    assert [kind for kind, _ in done] == ["delete", "create"]


def test_another_template_is_rolled_out_one_by_one() -> None:
    desired = pool()
    old = [pod(name, desired, template="other") for name in "ab"]
    first = pods_only(reconcile(view(desired, *old)))
    assert [kind for kind, _ in first] == ["create"]
    new = pod(first[0][1], desired, ready=False)
    assert pods_only(reconcile(view(desired, *old, new))) == []
    then = pods_only(reconcile(view(desired, *old, replace(new, ready=True))))
    assert [kind for kind, _ in then] == ["delete"]


def test_a_pool_that_is_frozen_replaces_what_is_lost_but_not_another_template() -> None:
    desired = pool()
    old = [pod(name, desired, template="other") for name in "ab"]
    assert pods_only(reconcile(view(desired, *old, is_frozen=True))) == []
    done = pods_only(reconcile(view(desired, old[0], is_frozen=True)))
    assert [kind for kind, _ in done] == ["create"]


@pytest.mark.parametrize(
    "fault",
    [
        {"scheduled": False, "node": ""},
        {"start_fault": "ErrImagePull: no such image"},
        {"restarts": 3, "last_end": "exit code 1"},
        {"restarts": 1, "last_end": "OOMKilled"},
    ],
)
def test_what_the_old_template_cannot_run_makes_room_for_the_new(fault: dict[str, Any]) -> None:
    desired = pool(replicas=1)
    failing = pod("a", desired, template="other", ready=False, **fault)
    done = pods_only(reconcile(view(desired, failing)))
    assert [kind for kind, _ in done] == ["create", "delete"]
    # Ready all the same, loading, or not ready for a moment: it stays until the new one is ready.
    for staying in (replace(failing, ready=True), pod("a", desired, template="other", ready=False)):
        if staying.scheduled:
            done = pods_only(reconcile(view(desired, staying)))
            assert [kind for kind, _ in done] == ["create"]


def test_while_the_deployment_rolls_out_its_numbers_count() -> None:
    desired = pool(rollout={"new": 1, "old": 1, "older": {"o1": 0, "o2": 1}})
    old = [pod(name, desired, revision=name[:2]) for name in ("o1-a", "o2-a", "o2-b")]
    done = pods_only(reconcile(view(desired, *old)))
    assert [kind for kind, _ in done] == ["create", "delete", "delete"]
    assert [name[:2] for kind, name in done if kind == "delete"] == ["o1", "o2"]


def test_a_lost_nodes_pods_are_forgotten_after_their_grace_and_not_before() -> None:
    desired = pool(replicas=1)
    lost = {"n1": ObservedNode("n1", ready=False, schedulable=True)}
    here = view(desired, pod("b", desired), pod("a", desired, deleting=True, deleted_s=NOW_S + 5))
    assert pods_only(reconcile(replace(here, nodes=lost))) == []
    late = replace(here, nodes=lost, now_s=NOW_S + 6)
    deleted = [each for each in reconcile(late) if isinstance(each, Delete)]
    assert [(each.target.name, each.grace_s) for each in deleted] == [("a", 0)]
    assert not [
        each for each in reconcile(replace(late, nodes=here.nodes)) if isinstance(each, Delete)
    ]


@pytest.mark.parametrize(("policy", "grace_s"), [("Drain", None), ("Immediate", 1)])
def test_a_pool_that_goes_drains_its_pods_first(policy: str, grace_s: int | None) -> None:
    desired = pool(deleted="1970-01-12T13:46:40Z", deletionPolicy=policy)
    here = view(desired, pod("a", desired))
    (deleted,) = [each for each in reconcile(here) if isinstance(each, Delete)]
    assert (deleted.target.uid, deleted.grace_s) == ("uid-a", grace_s)
    assert not any(isinstance(each, SetFinalizers) for each in reconcile(here))
    (last,) = reconcile(view(desired))
    assert isinstance(last, SetFinalizers)
    assert last.finalizers == ()


def test_a_pool_goes_in_the_end_even_if_its_pods_do_not() -> None:
    desired = pool(deleted="1970-01-12T13:46:40Z")
    late = replace(view(desired, pod("a", desired, deleting=True)), now_s=NOW_S + 700)
    assert any(isinstance(each, SetFinalizers) for each in reconcile(late))


def test_a_pool_is_ready_when_all_its_instances_are_of_its_present_spec() -> None:
    desired = pool()
    old, new = [pod(name, desired, template="other") for name in "ab"], [pod("c", desired)]
    for pods, expected in (
        (old, ("False", "RollingOut")),
        (old[:1] + new, ("False", "RollingOut")),
        (new, ("False", "NotReady")),
        ([*new, pod("d", desired)], ("True", "Ready")),
    ):
        (status,) = [
            e.status for e in reconcile(view(desired, *pods)) if isinstance(e, PatchStatus)
        ]
        ready = next(each for each in status["conditions"] if each["type"] == "Ready")
        assert (ready["status"], ready["reason"]) == expected
        assert ready["observedGeneration"] == status["observedGeneration"] == 3


def test_status_counts_what_is_and_is_written_once() -> None:
    desired = pool()
    here = view(desired, pod("a", desired), pod("b", desired, ready=False))
    (written,) = [each for each in reconcile(here) if isinstance(each, PatchStatus)]
    reported = written.status
    assert {k: reported[k] for k in ("replicas", "ready", "serving", "updated")} == {
        "replicas": 2, "ready": 1, "serving": 1, "updated": 2,
    }  # fmt: skip
    assert reported["selector"] == (
        "cleave.dev/pool=chat-decode,cleave.dev/component=worker,!cleave.dev/node-rank"
    )
    assert reported["observedGeneration"] == 3
    again = reconcile(replace(here, status=reported, now_s=NOW_S + 50))
    assert not [each for each in again if isinstance(each, PatchStatus)]


def test_a_converged_pool_needs_no_action() -> None:
    desired = pool()
    here = view(desired, pod("a", desired), pod("b", desired))
    first = reconcile(here)
    child = next(each for each in first if hasattr(each, "manifest")).manifest
    digest = child["metadata"]["annotations"]["cleave.dev/applied"]
    existing = ObservedChild("PodDisruptionBudget", "llm", child["metadata"]["name"], "b1", digest)
    status = next(each.status for each in first if isinstance(each, PatchStatus))
    settled = replace(here, children={(existing.kind, existing.name): existing}, status=status)
    assert reconcile(settled) == []


@pytest.mark.parametrize("isolation", [None, NetworkIsolation()])
def test_a_pool_by_hand_is_as_closed_as_one_of_a_deployment(
    isolation: NetworkIsolation | None,
) -> None:
    desired = pool()
    desired.metadata.owner_references.clear()
    settings = OperatorSettings(isolation=isolation)
    applied = [
        each.manifest
        for each in reconcile(view(desired, settings=settings))
        if isinstance(each, Apply)
    ]
    policies = [each for each in applied if each["kind"] == "NetworkPolicy"]
    assert bool(policies) == (isolation is not None)
    assert {each["metadata"]["name"] for each in policies} <= {"chat-workers"}


def test_an_instance_with_members_is_one_pod_with_an_agent_for_each() -> None:
    members = [{"role": "prefill"}, {"role": "decode", "replicas": 2}]
    desired = pool(role="mixed", replicas=1, members=members)
    (created,) = [each.manifest for each in reconcile(view(desired)) if isinstance(each, Create)]
    (container,) = created["spec"]["containers"]
    assert [each["name"] for each in container["ports"][::2]] == ["agent", "agent-1", "agent-2"]
    assert "affinity" not in created["spec"]
    existing = pod(created["metadata"]["name"], desired, role=Role.MIXED)
    assert pods_only(reconcile(view(desired, existing))) == []
    other = pool(role="mixed", replicas=1, members=members[:1])
    assert len(pods_only(reconcile(view(other, existing)))) == 1


def test_new_pods_request_the_nodes_rdma_device_and_running_ones_stay_without_it() -> None:
    desired = pool(engine={"type": "vLLM"})
    running = pod("a", desired)
    here = view(desired, running, rdma_device="rdma/hca")
    ((kind, name),) = pods_only(reconcile(here))
    assert kind == "create"
    created = next(each.manifest for each in reconcile(here) if isinstance(each, Create))
    assert created["spec"]["containers"][0]["resources"]["limits"]["rdma/hca"] == "1"
    # It is up to date, as those without the device are.
    again = replace(here, pods=(running, pod(name, desired)))
    assert created["metadata"]["annotations"]["cleave.dev/template"] == running.template
    assert pods_only(reconcile(again)) == []
    on_cpu = replace(here, settings=OperatorSettings(device="cpu"))
    created = next(each.manifest for each in reconcile(on_cpu) if isinstance(each, Create))
    assert "rdma/hca" not in created["spec"]["containers"][0]["resources"]["limits"]


class TestSeveralNodes:
    """An instance of two pods: a leader and a follower."""

    desired = pool(replicas=1, nodes=2, parallelism={"tensor": 16}, engine={"type": "vLLM"})

    def test_the_leader_is_created_first_and_the_follower_once_it_has_an_identity(self) -> None:
        ((_, leader),) = pods_only(reconcile(view(self.desired)))
        existing = pod(leader, self.desired, ready=False)
        (created,) = [
            each for each in reconcile(view(self.desired, existing)) if isinstance(each, Create)
        ]
        assert created.manifest["metadata"]["name"] == f"{leader}-1"
        assert created.manifest["metadata"]["ownerReferences"][0]["uid"] == f"uid-{leader}"

    def test_the_gang_that_the_pods_name_exists_before_the_follower(self) -> None:
        here = view(self.desired, settings=OperatorSettings(has_pod_groups=True))
        (created,) = (each for each in reconcile(here) if isinstance(each, Create))
        leader = created.manifest["metadata"]["name"]
        assert created.manifest["spec"]["schedulingGroup"] == {"podGroupName": leader}
        here = replace(here, pods=(pod(leader, self.desired, ready=False),))
        group, follower = (
            each.manifest
            for each in reconcile(here)
            if isinstance(each, Apply | Create) and each.manifest["kind"] in ("PodGroup", "Pod")
        )
        assert (group["kind"], group["metadata"]["name"]) == ("PodGroup", leader)
        assert group["metadata"]["ownerReferences"][0]["uid"] == f"uid-{leader}"
        assert follower["spec"]["schedulingGroup"] == {"podGroupName": leader}
        whole = pod(f"{leader}-1", self.desired, instance=leader, is_multi_node_worker=True)
        here = replace(here, pods=(*here.pods, whole))
        kinds = {
            each.manifest["kind"] for each in reconcile(here) if isinstance(each, Apply | Create)
        }
        assert "PodGroup" not in kinds

    def test_it_is_ready_when_both_are(self) -> None:
        leader = pod("a", self.desired)
        follower = pod("a-1", self.desired, instance="a", is_multi_node_worker=True, ready=False)
        for is_ready in (False, True):
            here = view(self.desired, leader, replace(follower, ready=is_ready))
            (status,) = [e.status for e in reconcile(here) if isinstance(e, PatchStatus)]
            assert (status["replicas"], status["ready"]) == (1, int(is_ready))

    def test_where_one_goes_both_go_and_another_instance_comes(self) -> None:
        leader = pod("a", self.desired)
        follower = pod("a-1", self.desired, instance="a", is_multi_node_worker=True, phase="Failed")
        done = pods_only(reconcile(view(self.desired, leader, follower)))
        assert done[:2] == [("delete", "a"), ("delete", "a-1")]
        assert [kind for kind, _ in done[2:]] == ["create"]


class TestDataParallelRanks:
    """An instance of four ranks in two pods."""

    desired = pool(replicas=1, nodes=2, parallelism={"data": 4})

    def test_the_second_pod_follows_also_where_sets_exist(self) -> None:
        here = view(self.desired, settings=OperatorSettings(has_leader_worker_sets=True))
        ((_, leader),) = pods_only(reconcile(here))
        existing = pod(leader, self.desired, ready=False)
        (created,) = [
            e for e in reconcile(replace(here, pods=(existing,))) if isinstance(e, Create)
        ]
        assert created.manifest["metadata"]["name"] == f"{leader}-1"
        further = created.manifest["metadata"]["labels"]
        assert further["cleave.dev/instance"] == leader
        assert further["cleave.dev/component"] == "worker"

    def test_a_drained_pod_drains_the_other(self) -> None:
        leader = pod("a", self.desired)
        further = pod("a-1", self.desired, instance="a", is_multi_node_worker=True, deleting=True)
        done = pods_only(reconcile(view(self.desired, leader, further)))
        assert done[0] == ("delete", "a")
        assert [kind for kind, _ in done[1:]] == ["create"]


class TestSets:
    """The same where LeaderWorkerSet is installed."""

    desired = TestSeveralNodes.desired
    settings = OperatorSettings(has_leader_worker_sets=True)

    def test_a_set_makes_the_whole_instance(self) -> None:
        here = view(self.desired, settings=self.settings)
        (created,) = [each.manifest for each in reconcile(here) if isinstance(each, Create)]
        assert created["kind"] == "LeaderWorkerSet"
        assert created["metadata"]["ownerReferences"][0]["uid"] == "p1"
        group = created["spec"]["leaderWorkerTemplate"]
        for part in ("leaderTemplate", "workerTemplate"):
            marks = group[part]["metadata"]["annotations"]
            assert marks == {"cleave.dev/template": apply.hash_template(self.desired)}

    def test_its_pods_are_an_instance_and_go_with_it(self) -> None:
        pods = [
            pod("x-0", self.desired, set_name="x", instance="x-0"),
            pod("x-0-1", self.desired, set_name="x", instance="x-0", is_multi_node_worker=True),
        ]
        here = view(self.desired, *pods, settings=self.settings)
        assert pods_only(reconcile(here)) == []
        none = pool(replicas=0, nodes=2, parallelism={"tensor": 16}, engine={"type": "vLLM"})
        (deleted,) = [
            each
            for each in reconcile(view(none, *pods, settings=self.settings))
            if isinstance(each, Delete)
        ]
        assert (deleted.target.kind, deleted.target.name) == ("LeaderWorkerSet", "x")

    def test_the_name_of_an_existing_pod_is_skipped(self) -> None:
        here = view(self.desired, settings=self.settings)
        ((_, first),) = pods_only(reconcile(here))
        gone = pod(f"{first}-0", self.desired, set_name=first, instance=f"{first}-0", deleting=True)
        ((_, again),) = [
            each
            for each in pods_only(reconcile(replace(here, pods=(gone,))))
            if each[0] == "create"
        ]
        assert again != first


def test_cells_are_filled_before_new_ones_are_begun() -> None:
    desired = pool(replicas=3, colocation={"perCell": 2})
    existing = pod("a", desired, cell=0)
    created = [
        each.manifest for each in reconcile(view(desired, existing)) if isinstance(each, Create)
    ]
    assert [each["metadata"]["labels"]["cleave.dev/cell"] for each in created] == ["0", "1"]


def test_instances_that_replace_others_of_their_revision_do_not_ask_for_their_nodes() -> None:
    desired = pool(replicas=2, colocation={"perCell": 2})
    old = [pod(name, desired, cell=0, template="old") for name in ("a", "b")]
    created = [each.manifest for each in reconcile(view(desired, *old)) if isinstance(each, Create)]
    assert [each["metadata"]["labels"]["cleave.dev/cell"] for each in created] == ["1"]


def test_new_names_never_collide() -> None:
    desired = pool()
    some = pool_pods.generate_names(desired, (), 5)
    assert len(set(some)) == 5
    more = pool_pods.generate_names(desired, some, 5)
    assert not set(some) & set(more)
    assert all(len(name) <= 63 for name in more)


@pytest.mark.parametrize(
    ("fields", "reason", "message"),
    [
        ({"start_fault": "ErrImagePull: x"}, "NotStarting", "a cannot start: ErrImagePull: x"),
        ({"restarts": 2, "last_end": "exit code 1"}, "TooFew", "1 of 2 instances are ready"),
        (
            {"restarts": 3, "last_end": "exit code 1"},
            "Restarting",
            "a was started again 3 times; the last time it ended: exit code 1",
        ),
        # It will happen again.
        (
            {"restarts": 1, "last_end": "OOMKilled"},
            "Restarting",
            "a was started again 1 times; the last time it ended: OOMKilled",
        ),
        ({"ready": True, "restarts": 9}, "Complete", "no instance keeps failing"),
    ],
)
def test_an_instance_that_does_not_start_is_reported(
    fields: dict[str, Any], reason: str, message: str
) -> None:
    desired = pool()
    failing = pod("a", desired, **{"ready": False, **fields})
    actions = reconcile(view(desired, failing, pod("b", desired)))
    status = next(each.status for each in actions if isinstance(each, PatchStatus))
    degraded = next(each for each in status["conditions"] if each["type"] == "Degraded")
    assert (degraded["reason"], degraded["message"]) == (reason, message)
