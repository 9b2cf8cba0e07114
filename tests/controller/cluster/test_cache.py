"""The index: what it keeps, whom a change concerns, and what it forgets."""

import json
from typing import Any

import pytest

from cleave.api.model import ModelSpec
from cleave.controller.cluster.cache import ObjectCache, ReadConfigMap, ResourceKey
from cleave.manifests.credentials import name_accounts
from cleave.manifests.labels import Manifest
from cleave.perf.model import model_source
from cleave.perf.model.known_models import CONFIGS

from tests.support.fake_cluster import chat, node

CHAT = ResourceKey("LLMDeployment", "default", "chat")
POOL = ResourceKey("InstancePool", "default", "chat-decode")


def build_object(manifest: Manifest, version: int = 1, uid: str = "u1", **meta: Any) -> Manifest:
    own = {**manifest["metadata"], "uid": uid, "resourceVersion": str(version), **meta}
    return {**manifest, "metadata": own}


def pool(version: int = 1, uid: str = "p1") -> Manifest:
    spec = {"deployment": "chat", "role": "decode", "revision": "a", "model": "org/model"}
    meta = {"name": "chat-decode", "namespace": "default"}
    kind = {"apiVersion": "cleave.dev/v1alpha1", "kind": "InstancePool"}
    return build_object({**kind, "metadata": meta, "spec": spec}, version, uid)


def pod(version: int = 1, uid: str = "i1", name: str = "chat-decode-x", **status: Any) -> Manifest:
    labels = {
        "cleave.dev/deployment": "chat",
        "cleave.dev/pool": "chat-decode",
        "cleave.dev/role": "decode",
        "cleave.dev/component": "worker",
        "cleave.dev/revision": "a",
    }
    meta = {"name": name, "namespace": "default", "labels": labels}
    kind = {"apiVersion": "v1", "kind": "Pod"}
    return build_object({**kind, "metadata": meta, "spec": {}, "status": status}, version, uid)


def filled() -> ObjectCache:
    cache = ObjectCache()
    cache.upsert(build_object(chat()))
    cache.upsert(pool())
    return cache


def test_a_pod_concerns_its_pool_and_its_deployment() -> None:
    cache = filled()
    assert cache.upsert(pod()) == {CHAT, POOL}
    assert [each.name for each in cache.list_pods(POOL)] == ["chat-decode-x"]
    assert cache.list_pods(CHAT) == cache.list_pods(POOL)


def test_a_pod_that_changes_pools_concerns_both_and_belongs_to_the_new_one() -> None:
    cache = filled()
    cache.upsert(pod())
    labels = pod()["metadata"]["labels"] | {"cleave.dev/pool": "chat-prefill"}
    moved = {**pod(version=2), "metadata": {**pod(version=2)["metadata"], "labels": labels}}
    assert cache.upsert(moved) == {CHAT, POOL}
    assert cache.list_pods(POOL) == ()
    assert [each.pool for each in cache.list_pods(CHAT)] == ["chat-prefill"]


def test_an_irrelevant_change_enqueues_nothing() -> None:
    cache = filled()
    cache.upsert(pod())
    assert cache.upsert(pod(version=2, hostIP="10.1.1.1")) == set()


def test_an_older_version_never_replaces_a_newer_one() -> None:
    cache = filled()
    cache.upsert(pod(version=5, phase="Running"))
    assert cache.upsert(pod(version=4, phase="Pending")) == set()
    assert cache.list_pods(POOL)[0].phase == "Running"


def test_what_has_gone_does_not_come_back() -> None:
    cache = filled()
    cache.upsert(pod())
    assert cache.delete(pod(version=3)) == {CHAT, POOL}
    assert cache.upsert(pod(version=2)) == set()
    assert cache.list_pods(POOL) == ()
    assert cache.upsert(pod(version=4, uid="i2")) == {CHAT, POOL}


def test_the_end_of_another_object_of_the_name_is_not_the_end_of_this_one() -> None:
    cache = filled()
    cache.upsert(pod(version=4, uid="i2"))
    assert cache.delete(pod(version=3, uid="i1")) == set()
    assert len(cache.list_pods(POOL)) == 1


def test_a_list_shows_what_has_gone_unseen() -> None:
    cache = filled()
    cache.upsert(pod(version=4))
    cache.upsert(pod(version=9, uid="i2", name="chat-decode-y"))
    # The second one is newer than the list: it may have come after it.
    assert cache.delete_missing("Pod", {}, before=8) == {CHAT, POOL}
    assert [each.name for each in cache.list_pods(POOL)] == ["chat-decode-y"]


def test_pools_belong_to_their_deployment_until_they_go() -> None:
    cache = filled()
    assert [seen.meta["name"] for seen in cache.list_pools(CHAT)] == ["chat-decode"]
    assert cache.delete(pool(version=2)) == {CHAT, POOL}
    assert cache.list_pools(CHAT) == []


def test_a_node_heartbeat_enqueues_nothing_and_a_gpu_change_enqueues_all() -> None:
    cache = filled()
    assert cache.upsert(build_object(node(), 1, "n1")) == {CHAT, POOL}
    assert cache.upsert(build_object(node(), 2, "n1")) == set()
    assert cache.upsert(build_object(node(gpus=4), 3, "n1")) == {CHAT, POOL}
    assert cache.delete(build_object(node(), 4, "n1")) == {CHAT, POOL}


def build_quota(gpus: int, version: int = 1, uid: str = "q1", **spec: Any) -> Manifest:
    meta = {"name": f"gpus-{uid}", "namespace": "default"}
    hard = {"requests.nvidia.com/gpu": str(gpus), "pods": "9"}
    kind = {"apiVersion": "v1", "kind": "ResourceQuota"}
    return build_object({**kind, "metadata": meta, "spec": {"hard": hard, **spec}}, version, uid)


def test_the_tightest_quota_for_gpus_counts() -> None:
    cache = filled()
    assert cache.find_gpu_quota("default") is None
    assert cache.upsert(build_quota(8)) == {CHAT}
    assert cache.upsert(build_quota(4, uid="q2")) == {CHAT}
    assert cache.upsert(build_quota(4, 2, "q2")) == set(), "only what is used has changed"
    assert cache.find_gpu_quota("default") == ("gpus-q2", 4)
    assert cache.find_gpu_quota("other") is None
    assert cache.delete(build_quota(4, 3, "q2")) == {CHAT}
    assert cache.find_gpu_quota("default") == ("gpus-q1", 8)
    assert cache.upsert({**build_quota(8, 4), "spec": {"hard": {"pods": "9"}}}) == {CHAT}
    assert cache.find_gpu_quota("default") is None


@pytest.mark.parametrize(
    "part",
    [{"scopes": ["BestEffort"]}, {"scopeSelector": {"matchExpressions": [{"operator": "In"}]}}],
)
def test_a_quota_for_some_pods_is_no_budget(part: dict[str, Any]) -> None:
    cache = filled()
    assert cache.upsert(build_quota(8, **part)) == set()
    assert cache.find_gpu_quota("default") is None


def test_a_node_that_fails_concerns_the_pools_that_have_pods_there() -> None:
    cache = filled()
    cache.upsert(build_object(node(), 1, "n1"))
    down = build_object(node(), 2, "n1")
    down["status"] = {**down["status"], "conditions": [{"type": "Ready", "status": "False"}]}
    assert cache.upsert(down) == set()
    existing = pod()
    existing["spec"] = {"nodeName": "n1"}
    cache.upsert(existing)
    assert cache.upsert(build_object(node(), 3, "n1")) == {POOL}


def test_children_are_found_by_their_owner() -> None:
    cache = filled()
    owner = {"kind": "LLMDeployment", "name": "chat", "uid": "u1"}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "chat", "namespace": "default"},
    }
    existing = build_object(
        service, 1, "s1", ownerReferences=[owner], annotations={"cleave.dev/applied": "x"}
    )
    assert cache.upsert(existing) == {CHAT}
    assert cache.get_children("u1")["Service", "chat"].applied == "x"
    assert cache.delete(existing) == {CHAT}
    assert not cache.get_children("u1")


OWNER = {"kind": "ReplicaSet", "name": "chat-gateway-5d8", "uid": "r", "controller": True}


def gateway_pod(version: int = 1, owner: dict | None = OWNER, **status: Any) -> dict:
    built = pod(version, uid="g1", name="chat-gateway-1", **status)
    built["metadata"]["labels"] |= {
        "cleave.dev/component": "gateway",
        "pod-template-hash": "5d8",
    }
    built["metadata"]["ownerReferences"] = [owner] if owner else []
    return built


def test_gateways_are_known_by_address() -> None:
    cache = filled()
    gateway = gateway_pod(podIP="10.0.0.9")
    assert cache.upsert(gateway) == set()
    assert cache.list_gateways(CHAT) == ("10.0.0.9",)
    assert cache.list_pods(CHAT) == ()
    cache.delete(gateway)
    assert cache.list_gateways(CHAT) == ()


def test_a_gateway_that_cannot_start_is_a_change_of_its_deployment() -> None:
    cache = filled()
    waiting = {"reason": "ErrImagePull", "message": "no such host"}
    stuck = [{"state": {"waiting": waiting}}]
    assert cache.upsert(gateway_pod(containerStatuses=stuck)) == {CHAT}
    assert cache.find_gateway_fault(CHAT) == "chat-gateway-1: ErrImagePull: no such host"
    assert cache.upsert(gateway_pod(2, containerStatuses=stuck)) == set()
    assert cache.delete(gateway_pod(3)) == {CHAT}
    assert cache.find_gateway_fault(CHAT) == ""


def test_a_gateway_without_a_node_is_a_change_of_its_deployment() -> None:
    cache = filled()
    reason = "0/2 nodes are available: 2 Insufficient cpu"
    unplaced = {
        "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": reason,
    }  # fmt: skip
    pending = gateway_pod(phase="Pending", conditions=[unplaced])
    assert cache.upsert(pending) == {CHAT}
    assert cache.find_gateway_wait(CHAT) == f"chat-gateway-1 has no node: {reason}"
    assert cache.find_gateway_fault(CHAT) == ""
    pending["spec"] = {"nodeName": "a"}
    assert cache.upsert(pending) == {CHAT}
    assert "kubectl describe pod chat-gateway-1" in cache.find_gateway_wait(CHAT)
    pending["status"]["phase"] = "Running"
    assert cache.upsert(pending) == {CHAT}
    assert cache.find_gateway_wait(CHAT) == ""


@pytest.mark.parametrize(
    "owner",
    [
        {"kind": "ReplicaSet", "name": "other-5d8", "uid": "r", "controller": True},
        {"kind": "ReplicaSet", "name": "chat-gateway-5d8", "uid": "r"},
        {"kind": "Job", "name": "chat-gateway-5d8", "uid": "r", "controller": True},
        None,
    ],
)
def test_a_pod_that_only_has_a_gateways_labels_is_not_queried(owner: dict | None) -> None:
    cache = filled()
    cache.upsert(gateway_pod(owner=owner, podIP="10.0.0.9"))
    assert cache.list_gateways(CHAT) == ()


def test_a_faulty_resource_is_stored_with_its_faults() -> None:
    cache = ObjectCache()
    assert cache.upsert(build_object(chat(slo={"ttftMs": "soon", "tpotMs": 1}))) == {CHAT}
    seen = cache.get(CHAT)
    assert seen is not None
    assert seen.resource is None
    assert seen.faults == ("spec.slo.ttftMs: must be a number (got 'soon')",)


def declare_config(key: str = "config.json", name: str = "new", version: int = 1) -> Manifest:
    config = {"configMapKeyRef": {"name": name, "key": key}}
    return build_object(chat(model={"source": "org/new", "config": config}), version)


def get_model(cache: ObjectCache) -> ModelSpec:
    cached = cache.get(CHAT)
    assert cached is not None
    assert cached.resource is not None
    return cached.resource.spec.model


def get_fault(cache: ObjectCache) -> str:
    cached = cache.get(CHAT)
    assert cached is not None
    return cached.model_fault


def test_a_deployment_gets_the_config_map_that_it_refers_to() -> None:
    cache, text = ObjectCache(), json.dumps(CONFIGS["qwen3-8b"])
    cache.upsert(declare_config())
    assert get_fault(cache) == "ConfigMap new has not been read yet"
    cache.set_config_map(CHAT, ReadConfigMap("new", {"config.json": text, "b": "{}"}))
    assert model_source.load_known_shape(get_model(cache)).num_layers == 36
    assert get_fault(cache) == ""
    # Other edits keep it, another name does not.
    cache.upsert(declare_config(version=2))
    assert get_fault(cache) == ""
    assert get_model(cache).shape_field == "spec.model.config.inline"
    cache.upsert(declare_config(key="b", version=3))
    assert get_fault(cache).startswith("ConfigMap new, key b: new: model_type is missing")
    cache.upsert(declare_config(name="other", version=4))
    assert get_fault(cache) == "ConfigMap other has not been read yet"
    cache.delete(declare_config())
    cache.set_config_map(CHAT, ReadConfigMap("other"))
    assert cache.get(CHAT) is None


def test_a_config_map_that_is_gone_takes_the_config_with_it() -> None:
    cache, text = ObjectCache(), json.dumps(CONFIGS["qwen3-8b"])
    cache.upsert(declare_config())
    cache.set_config_map(CHAT, ReadConfigMap("new", {"config.json": text}))
    cache.set_config_map(CHAT, ReadConfigMap("new", fault="it does not exist"))
    assert get_fault(cache) == "it does not exist"
    assert get_model(cache).shape_field == "spec.model.config.configMapKeyRef"
    cache.upsert(build_object(chat(), version=2))
    assert get_fault(cache) == ""


def test_without_an_optional_config_map_a_deployment_is_one_without_a_config() -> None:
    cache, text = ObjectCache(), json.dumps(CONFIGS["qwen3-8b"])
    config = {"configMapKeyRef": {"name": "new", "optional": True}}
    declared = build_object(chat(model={"source": "org/new", "config": config}))
    report = {"source": "org/new", "instance": "p", "maxModelLen": 4096, "blockSize": 16}
    report["config"] = CONFIGS["llama-3.1-70b"]
    gone = ReadConfigMap("new", fault="it does not exist", is_missing=True)
    for read in (gone, ReadConfigMap("new", {"another": text})):
        cache.upsert(declared)
        cache.set_config_map(CHAT, read)
        assert (get_fault(cache), get_model(cache).config) == ("", None)
        cache.upsert({**declared, "status": {"reportedModel": report}})
        assert model_source.load_known_shape(get_model(cache)).num_layers == 80
        cache.set_config_map(CHAT, ReadConfigMap("new", {"config.json": text}))
        assert model_source.load_known_shape(get_model(cache)).num_layers == 36
    cache.set_config_map(CHAT, ReadConfigMap("new", fault="it may not be read"))
    assert get_fault(cache) == "it may not be read"


def test_a_deployment_gets_the_config_that_an_engine_has_reported() -> None:
    cache = ObjectCache()
    report = {"source": "org/new", "instance": "p", "maxModelLen": 4096, "blockSize": 16}
    report["config"] = CONFIGS["qwen3-8b"]
    declared = build_object(chat(model="org/new"))
    cache.upsert({**declared, "status": {"reportedModel": report}})
    assert model_source.load_known_shape(get_model(cache)).num_layers == 36
    # Not one that is about another model, or that a person has written wrongly.
    for version, changed in enumerate(({"source": "org/old"}, {"config": {"hidden_size": 1}}), 2):
        declared = build_object(chat(model="org/new"), version=version)
        cache.upsert({**declared, "status": {"reportedModel": {**report, **changed}}})
        assert get_model(cache).config is None


def test_pod_groups_are_not_kept_as_nothing_reports_their_end() -> None:
    cache = filled()
    before = cache.count()
    meta = {"name": "x", "namespace": "default", "ownerReferences": [{"kind": "Pod", "uid": "i1"}]}
    group = {"apiVersion": "scheduling.k8s.io/v1beta1", "kind": "PodGroup", "metadata": meta}
    assert cache.upsert(build_object(group, uid="g1")) == set()
    assert cache.count() == before


def account(name: str, *owners: tuple[str, str], **meta: Any) -> Manifest:
    """A service account that these resources own, by kind and uid."""
    references = [{"kind": kind, "name": "x", "uid": uid} for kind, uid in owners]
    own = {"name": name, "namespace": "default", "labels": {"cleave.dev/deployment": "chat"}}
    kind = {"apiVersion": "v1", "kind": "ServiceAccount"}
    return build_object(
        {**kind, "metadata": own}, uid=f"of-{name}", ownerReferences=references, **meta
    )


def test_only_an_account_that_the_deployment_owns_is_its_account() -> None:
    own = name_accounts("default", "chat", "u1").workers
    for one in (
        account(own),
        account(own, ("LLMDeployment", "u2")),
        account(own, ("Deployment", "u9")),
        account("chat-workers", ("LLMDeployment", "u1")),
        account(own, ("LLMDeployment", "u1"), deletionTimestamp="2026-01-02T03:04:05Z"),
    ):
        cache = filled()
        cache.upsert(one)
        assert not cache.has_account(CHAT)
    cache = filled()
    assert not cache.has_account(CHAT)
    cache.upsert(account(own, ("LLMDeployment", "u1")))
    assert cache.has_account(CHAT)
    cache.delete(account(own, ("LLMDeployment", "u1")))
    assert not cache.has_account(CHAT)


def test_pools_by_hand_share_an_account_that_any_of_them_owns() -> None:
    cache = ObjectCache()
    cache.upsert(pool())
    shared = name_accounts("default", "chat").workers
    cache.upsert(account(shared))
    assert not cache.has_account(CHAT), "of nobody that is known"
    cache.upsert(build_object(account(shared, ("InstancePool", "p1")), version=2, uid="of-shared"))
    assert cache.has_account(CHAT)
    assert cache.list_owners("default", "chat") == {"p1"}
    assert cache.list_owners("default", "other") == set()
