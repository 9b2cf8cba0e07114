"""GPUs are planned once: what is left for each deployment."""

import json
from typing import Any

import pytest

from cleave.api.deployment import LLMDeployment
from cleave.controller.cluster.cache import ObjectCache, ResourceKey
from cleave.controller.cluster.objects import ObservedNode
from cleave.controller.gpu_reservations import GpuReservations
from cleave.manifests.labels import Manifest
from cleave.manifests.topology import NodeTopology

from tests.support.built_pools import build_pools
from tests.support.fake_cluster import chat, manual_placement

NODE = ObservedNode("n1", True, True, gpu="H100", num_gpus=16)
PLAN = {
    "pools": [
        {"role": "prefill", "replicas": 2, "parallelism": {"tensor": 2}},
        {"role": "decode", "replicas": 1, "parallelism": {"tensor": 4}},
    ],
    "revision": "r1",
    "gpus": 8,
    "reason": "",
    "inputs": "x",
}


class Stage:
    def __init__(self, topology: NodeTopology = NodeTopology()) -> None:  # noqa: B008
        self.cache = ObjectCache()
        self.reservations = GpuReservations(self.cache, "gpu", lambda _: topology)
        self.version = 0

    def put(self, name: str, status: Manifest | None = None, **spec: Any) -> ResourceKey:
        declared = chat(**{"engine": {"type": "vLLM"}, **spec})
        meta = {"namespace": "default", "name": name}
        return self.upsert({**declared, "metadata": meta, "status": status or {}})

    def put_pools(self, name: str, **replicas: int) -> None:
        resource = LLMDeployment.model_validate(
            {
                **chat(engine={"type": "vLLM"}, placement=manual_placement(**replicas)),
                "metadata": {"name": name},
            }
        )
        for pool in build_pools(resource, NodeTopology()):
            self.upsert(json.loads(pool.model_dump_json(exclude_none=True)))

    def put_pod(self, deployment: str, name: str, node: str) -> None:
        labels = {
            "cleave.dev/deployment": deployment,
            "cleave.dev/pool": f"{deployment}-decode",
            "cleave.dev/role": "decode",
            "cleave.dev/component": "worker",
        }
        meta = {"name": name, "namespace": "default", "labels": labels}
        self.upsert({"kind": "Pod", "metadata": meta, "spec": {"nodeName": node}})

    def upsert(self, manifest: Manifest) -> ResourceKey:
        self.version += 1
        meta = {**manifest["metadata"], "uid": manifest["metadata"]["name"]}
        meta["resourceVersion"] = str(self.version)
        for key in self.cache.upsert({**manifest, "metadata": meta}):
            self.reservations.mark_changed(key)
        return ResourceKey(manifest["kind"], "default", meta["name"])

    def delete(self, key: ResourceKey) -> None:
        meta = {"namespace": "default", "name": key.name, "uid": key.name}
        for each in self.cache.delete({"kind": key.kind, "metadata": meta}):
            self.reservations.mark_changed(each)

    def count_free(self, key: ResourceKey) -> int:
        return sum(node.num_gpus for node in self.reservations.find_free(key, [NODE]).nodes)


def test_a_deployment_may_use_its_own_gpus_and_none_of_others() -> None:
    stage = Stage()
    one, two = stage.put("one"), stage.put("two")
    stage.put_pools("one", prefill=2, decode=3)
    assert (stage.count_free(one), stage.count_free(two)) == (16, 11)
    stage.put_pools("two", mixed=4)
    assert (stage.count_free(one), stage.count_free(two)) == (12, 11)
    for role in ("prefill", "decode"):
        stage.delete(ResourceKey("InstancePool", "default", f"one-{role}"))
    assert stage.count_free(two) == 16


def test_pools_without_a_deployment_count() -> None:
    stage = Stage()
    stage.put_pools("manual", decode=3)
    key = stage.put("chat")
    assert stage.count_free(key) == 13
    stage.delete(ResourceKey("InstancePool", "default", "manual-decode"))
    assert stage.count_free(key) == 16


def test_a_finished_plan_is_reserved_until_its_pools_exist() -> None:
    stage = Stage()
    one, two = stage.put("one"), stage.put("two")
    stage.reservations.reserve(one, PLAN)
    assert (stage.count_free(one), stage.count_free(two)) == (16, 8)
    stage.reservations.release(one, dict(PLAN))
    assert stage.count_free(two) == 8, "that of a newer plan stays"
    stage.reservations.release(one, stage.reservations.get_plan(one))
    assert stage.count_free(two) == 16


def test_a_reserved_plan_replaces_what_the_pools_have_except_where_others_own_the_number() -> None:
    stage = Stage()
    one, two = stage.put("one"), stage.put("two")
    stage.put_pools("one", prefill=5, decode=5)
    stage.reservations.reserve(one, PLAN)
    assert stage.count_free(two) == 8
    stage.put_pools("one", prefill=1, decode=1)
    owned = stage.cache.get(ResourceKey("InstancePool", "default", "one-decode"))
    assert owned is not None
    assert owned.resource is not None
    manifest = json.loads(owned.resource.model_dump_json(exclude_none=True))
    manifest["spec"] |= {"owner": "Autoscaler", "replicas": 7}
    stage.upsert(manifest)
    assert stage.count_free(two) == 16 - 4 - 7


@pytest.mark.parametrize(
    ("declared", "free"),
    [
        ({"status": {"plan": PLAN}}, 8),
        ({"placement": manual_placement(mixed=5)}, 11),
        ({}, 16),
        ({"status": {"plan": PLAN}, "paused": True}, 16),
        ({"status": {"plan": {"pools": "of a later version"}}}, 16),
        ({"status": {"plan": PLAN}, "engine": {"type": "Emulated"}}, 16),
    ],
)
def test_a_deployment_without_pools_claims_those_that_it_is_about_to_get(
    declared: dict[str, Any], free: int
) -> None:
    """An operator may end between the status with the plan and the pools."""
    stage = Stage()
    stage.put("one", **declared)
    assert stage.count_free(stage.put("two")) == free


def test_a_placement_that_no_pool_can_have_stops_no_other_deployment() -> None:
    stage = Stage(NodeTopology({"H100": 1}))
    placement = manual_placement(mixed=1)
    wide = stage.put("wide", placement=placement)
    chat = stage.put("chat")
    assert stage.count_free(chat) == 15
    size = {"tensor": 8, "pipeline": 10}
    stage.put("wide", placement={"manual": [{**placement["manual"][0], "parallelism": size}]})
    assert stage.count_free(chat) == 16
    assert stage.reservations.take_gain()
    stage.put("wide", placement=placement)
    assert stage.count_free(chat) == 15
    stage.delete(wide)
    assert stage.count_free(chat) == 16


def test_what_is_given_back_is_known_once() -> None:
    stage = Stage()
    stage.put("one")
    stage.put_pools("one", decode=2)
    assert not stage.reservations.take_gain(), "what is taken is no gain"
    stage.put_pools("one", decode=1)
    assert stage.reservations.take_gain()
    assert not stage.reservations.take_gain()
    stage.put_pools("one", decode=1)
    assert not stage.reservations.take_gain()


def test_a_gain_is_known_although_another_deployment_was_planned_meanwhile() -> None:
    stage = Stage()
    other = stage.put("other")
    stage.put_pools("one", decode=2)
    assert stage.count_free(other) == 14
    stage.put_pools("one", decode=1)
    assert stage.count_free(other) == 15
    assert stage.reservations.take_gain()


def test_a_quota_leaves_what_the_others_of_the_namespace_do_not_claim() -> None:
    stage = Stage()
    one, two = stage.put("one"), stage.put("two")
    stage.put_pools("one", decode=2)
    assert stage.reservations.find_quota(two) is None
    spec, meta = (
        {"hard": {"requests.nvidia.com/gpu": "3"}},
        {"name": "gpus", "namespace": "default"},
    )
    stage.upsert({"kind": "ResourceQuota", "metadata": meta, "spec": spec})
    assert str(stage.reservations.find_quota(two)) == "ResourceQuota gpus leaves 1 of 3 GPUs"
    assert str(stage.reservations.find_quota(one)) == "ResourceQuota gpus leaves 3 of 3 GPUs"


def test_what_a_lower_priority_lends_is_free_for_a_higher_one() -> None:
    stage = Stage()
    low = stage.put("low", planning={"minGPUs": 3})
    stage.put_pools("low", decode=8)
    equal = stage.put("equal")
    high = stage.put("high", planning={"priority": 1})
    assert [stage.count_free(each) for each in (low, equal, high)] == [16, 8, 13]
    spec, meta = {"hard": {"requests.nvidia.com/gpu": "10"}}, {"name": "q", "namespace": "default"}
    stage.upsert({"kind": "ResourceQuota", "metadata": meta, "spec": spec})
    quotas = [stage.reservations.find_quota(each) for each in (equal, high)]
    assert [quota and quota.num_left for quota in quotas] == [2, 7]
    for changed in ({"paused": True}, {"planning": {"minGPUs": 3, "mode": "Advisory"}}, {}):
        stage.put("low", **changed)
        assert stage.count_free(high) == 8, "lends nothing"
    stage.reservations.take_gain()
    stage.put("low", planning={"minGPUs": 3})
    assert stage.reservations.take_gain(), "what it lends now may be planned with"


def test_instances_of_another_owner_are_not_lent() -> None:
    stage = Stage()
    stage.put("low", planning={"minGPUs": 0})
    stage.put_pools("low", decode=8)
    high = stage.put("high", planning={"priority": 1})
    assert stage.count_free(high) == 15
    owned = stage.cache.get(ResourceKey("InstancePool", "default", "low-decode"))
    assert owned is not None
    assert owned.resource is not None
    manifest = json.loads(owned.resource.model_dump_json(exclude_none=True))
    manifest["spec"]["owner"] = "Autoscaler"
    stage.upsert(manifest)
    assert stage.count_free(high) == 8


def test_lenders_are_named_once_for_what_is_reclaimed() -> None:
    stage, nodes = Stage(), [NODE]
    low = stage.put("low", planning={"minGPUs": 0})
    stage.put_pools("low", decode=16)
    for number in range(16):
        stage.put_pod("low", f"low-{number:02}", "n1")
    high = stage.put("high", planning={"priority": 1})
    assert stage.reservations.list_lenders(nodes) == []
    assert stage.reservations.find_room(low, nodes) is None
    stage.reservations.reserve(high, PLAN)
    assert stage.reservations.list_lenders(nodes) == [low]
    assert stage.reservations.list_lenders(nodes) == []
    assert len(stage.reservations.get_reclaimed(low, nodes)) == 8
    assert stage.reservations.find_room(high, nodes) is None
    room = stage.reservations.find_room(low, nodes)
    assert room is not None
    assert (len(room.held), sum(node.num_gpus for node in room.nodes)) == (8, 0)
    # The pool has fewer replicas now, and deletes the same ones.
    reclaimed = stage.reservations.get_reclaimed(low, nodes)
    stage.put_pools("low", decode=8)
    assert stage.reservations.get_reclaimed(low, nodes) == reclaimed
    spec, meta = {"hard": {"requests.nvidia.com/gpu": "10"}}, {"name": "q", "namespace": "default"}
    stage.upsert({"kind": "ResourceQuota", "metadata": meta, "spec": spec})
    assert len(stage.reservations.get_reclaimed(low, nodes)) == 14
    stage.reservations.release(high, stage.reservations.get_plan(high))
    assert stage.reservations.get_reclaimed(low, nodes) == frozenset()
