"""Which instances change pools: pure decisions, and the operator against a cluster in memory."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.api.deployment import LLMDeployment
from cleave.api.pool import InstancePool
from cleave.api.role import Role
from cleave.controller.cluster import apply
from cleave.controller.cluster.actions import Create, Delete, Repurpose
from cleave.controller.cluster.objects import ObservedPod
from cleave.controller.deployment import repurpose
from cleave.manifests.labels import Manifest
from cleave.rpc.credentials import AgentEndpoint
from cleave.rpc.fleet_status import FleetInstance

from tests.controller.test_convergence import ControlPlane, control_plane, ready
from tests.support.built_pools import build_pools as make_pools
from tests.support.fake_cluster import chat, manual_placement


def pool(role: Role, replicas: int, **spec: Any) -> InstancePool:
    meta = {"name": f"chat-{role}", "namespace": "default", "uid": f"p-{role}"}
    labels = {"deployment": "chat", "role": str(role), "revision": "a", "model": "org/model"}
    return InstancePool.model_validate(
        {
            "apiVersion": "cleave.dev/v1alpha1",
            "kind": "InstancePool",
            "metadata": meta,
            "spec": {**labels, "replicas": replicas, **spec},
        }
    )


def pools(**spec: Any) -> Any:
    """Pools by role, from their numbers."""
    return lambda **counts: {
        Role(role): pool(Role(role), count, **spec) for role, count in counts.items()
    }


def pods(of: InstancePool, **fields: Any) -> list[ObservedPod]:
    pod_fields = {"ready": True, "ip": "10.0.0.1", "template": apply.hash_template(of), "load": 1.0}
    pod_fields |= fields
    return [
        ObservedPod(f"{of.name}-{n}", f"u{n}", of.spec.role, "a", pool=of.name, **pod_fields)
        for n in range(of.spec.replicas)
    ]


def build_all_pods(current: dict[Role, InstancePool], **fields: Any) -> list[ObservedPod]:
    return [pod for each in current.values() for pod in pods(each, **fields)]


def chosen(current: Any, desired: Any, **fields: Any) -> list[tuple[str, Role]]:
    found = repurpose.choose_changes(build_all_pods(current, **fields), desired, current)
    return [(change.pod.name, change.role) for change in found]


count = pools()


def test_one_too_many_here_goes_where_one_is_missing() -> None:
    current, desired = count(prefill=1, decode=3), count(prefill=2, decode=2)
    ((name, role),) = chosen(current, desired)
    assert name.startswith("chat-decode")
    assert role is Role.PREFILL


def test_the_emptiest_one_moves() -> None:
    current, desired = count(prefill=1, decode=2), count(prefill=2, decode=1)
    busy, idle = pods(current[Role.DECODE])
    all_pods = [*pods(current[Role.PREFILL]), replace(busy, load=9.0), replace(idle, load=0.0)]
    (change,) = repurpose.choose_changes(all_pods, desired, current)
    assert change.pod.name == idle.name


def test_a_role_that_only_shrinks_moves_no_instance() -> None:
    assert chosen(count(prefill=1, decode=3), count(prefill=1, decode=1)) == []


def test_no_more_move_than_are_missing() -> None:
    assert len(chosen(count(prefill=1, decode=5), count(prefill=3, decode=1))) == 2


@pytest.mark.parametrize(
    "spec",
    [
        {"parallelism": {"tensor": 2}},
        {"engine": {"args": ["--max-num-seqs", "8"]}},
        {"template": {"drainTimeoutS": 7}},
        {"revision": "b"},
    ],
)
def test_instances_of_another_template_do_not_move(spec: dict[str, Any]) -> None:
    current = count(prefill=1, decode=3)
    desired = {Role.PREFILL: pool(Role.PREFILL, 2, **spec), Role.DECODE: pool(Role.DECODE, 2)}
    assert chosen(current, desired) == []


@pytest.mark.parametrize(("engine", "alike"), [({}, False), ({"scheduling": {}}, True)])
def test_engines_that_follow_their_role_are_equal_under_any_role_limits(
    engine: dict[str, Any], alike: bool
) -> None:
    limits = [
        {"role": "prefill", "maxNumSeqs": 256, "maxNumBatchedTokens": 8192},
        {"role": "decode", "maxNumSeqs": 512, "maxNumBatchedTokens": 2048},
    ]
    resource = chat(placement={"manual": limits}, engine={"type": "Emulated", **engine})
    deployment = LLMDeployment.model_validate(resource)
    prefill, decode = make_pools(deployment)
    assert repurpose.are_compatible(prefill, decode) is alike


@pytest.mark.parametrize("spec", [{"nodes": 2, "parallelism": {"tensor": 2}},
                                  {"colocation": {"perCell": 1}},
                                  {"parallelism": {"data": 2}}])  # fmt: skip
def test_what_is_bound_to_its_place_does_not_move(spec: dict[str, Any]) -> None:
    bound = pools(**spec)
    assert chosen(bound(prefill=1, decode=3), bound(prefill=2, decode=2)) == []


@pytest.mark.parametrize("fields", [{"ready": False}, {"ip": ""}, {"template": "older"},
                                    {"deleting": True}, {"phase": "Failed"}])  # fmt: skip
def test_an_unreachable_instance_does_not_move(fields: dict[str, Any]) -> None:
    assert chosen(count(prefill=1, decode=3), count(prefill=2, decode=2), **fields) == []


def test_no_instance_moves_while_revisions_change() -> None:
    current, desired = count(prefill=1, decode=3), count(prefill=2, decode=2)
    all_pods = [
        *build_all_pods(current),
        replace(pods(current[Role.DECODE])[0], name="x", revision="old"),
    ]
    assert repurpose.choose_changes(all_pods, desired, current) == []


counts = st.fixed_dictionaries({str(role): st.integers(0, 6) for role in Role})


@given(counts, counts)
def test_moves_bring_every_pool_closer_and_none_past_its_target(
    now: dict[str, int], desired_counts: dict[str, int]
) -> None:
    current, desired = count(**now), count(**desired_counts)
    all_pods = build_all_pods(current)
    changes = repurpose.choose_changes(all_pods, desired, current)
    after = Counter(pod.role for pod in repurpose.apply_changes(all_pods, changes))
    assert len({change.pod.name for change in changes}) == len(changes)
    for role in Role:
        low, high = sorted((now[role], desired_counts[role]))
        assert low <= after[role] <= high
    # What could move has moved: nothing is left over here and missing there.
    over = any(after[role] > desired_counts[role] for role in Role)
    short = any(after[role] < desired_counts[role] for role in Role)
    assert not (over and short)


def test_an_order_names_the_pod_its_agent_and_its_new_owner() -> None:
    current, desired = count(prefill=1, decode=2), count(prefill=2, decode=1)
    changes = repurpose.choose_changes(build_all_pods(current), desired, current)
    (order,) = repurpose.build_actions(changes, current)
    assert order.agent == AgentEndpoint("10.0.0.1:9000", "chat-decode-0", "u0")
    assert order.role is Role.PREFILL
    meta = order.metadata
    assert meta["labels"] == {"cleave.dev/pool": "chat-prefill", "cleave.dev/role": "prefill"}
    assert meta["annotations"]["cleave.dev/template"] == apply.hash_template(desired[Role.PREFILL])
    assert [owner["uid"] for owner in meta["ownerReferences"]] == ["p-prefill"]


def test_an_agent_with_another_role_gets_a_call() -> None:
    current = count(prefill=1, decode=1)
    known = {
        "chat-decode-0": FleetInstance("chat-decode-0", role="prefill", home="prefill"),
        # Lent, not moved.
        "chat-prefill-0": FleetInstance("chat-prefill-0", role="mixed", home="prefill"),
    }
    (order,) = repurpose.correct_roles(build_all_pods(current), known, current)
    assert order.target.name == "chat-decode-0"
    assert order.role is Role.DECODE
    assert not order.metadata


def moved_control_plane(before: Manifest, after: Manifest) -> tuple[ControlPlane, set[str], int]:
    """A control plane after an edit has settled, its pods before, and its log length before."""
    here = control_plane(placement=before)
    here.converge()
    uids = {pod["metadata"]["uid"] for pod in here.cluster.pods()}
    length = len(here.cluster.log)
    here.cluster.edit("LLMDeployment", "chat", placement=after)
    here.converge()
    return here, uids, length


def test_counts_that_move_from_one_role_to_the_other_restart_nothing() -> None:
    here, uids, length = moved_control_plane(
        manual_placement(prefill=1, decode=3), manual_placement(prefill=2, decode=2)
    )
    assert ready(here.cluster) == {"prefill": 2, "decode": 2}
    assert {pod["metadata"]["uid"] for pod in here.cluster.pods()} == uids
    done = here.cluster.log[length:]
    assert sum(isinstance(each, Repurpose) for each in done) == 1
    assert not any(isinstance(each, Create) for each in done)


def test_a_plan_without_hand_offs_keeps_all_instances() -> None:
    here, uids, length = moved_control_plane(
        manual_placement(prefill=1, decode=2), manual_placement(mixed=3)
    )
    assert ready(here.cluster) == {"mixed": 3}
    assert {pod["metadata"]["uid"] for pod in here.cluster.pods()} == uids
    gone = [each for each in here.cluster.log[length:] if isinstance(each, Delete)]
    assert {each.target.kind for each in gone} == {"InstancePool"}


def test_a_name_that_has_moved_away_is_not_given_twice() -> None:
    here, uids, _ = moved_control_plane(
        manual_placement(prefill=1, decode=3), manual_placement(prefill=2, decode=2)
    )
    here.cluster.edit("LLMDeployment", "chat", placement=manual_placement(prefill=2, decode=4))
    here.converge()
    assert ready(here.cluster) == {"prefill": 2, "decode": 4}
    assert {pod["metadata"]["uid"] for pod in here.cluster.pods()} > uids


def test_an_instance_whose_agent_refuses_is_replaced() -> None:
    here = control_plane(placement=manual_placement(prefill=1, decode=3))
    here.converge()
    here.cluster.refuses_orders = True
    here.cluster.edit("LLMDeployment", "chat", placement=manual_placement(prefill=2, decode=2))
    here.converge()
    assert ready(here.cluster) == {"prefill": 2, "decode": 2}
