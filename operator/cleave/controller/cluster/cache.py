"""The object cache: the last known version of every object, and which keys a change affects.

Filled by handlers and by the responses to the operator's own writes, so that a decision always
includes the writes of the previous one. Watch events may be late, repeated or lost. An older
version never replaces a newer one, a deleted object does not come back, and
`ObjectCache.delete_missing` removes objects whose deletion was not reported.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from pydantic import ValidationError

from cleave.api.deployment import LLMDeployment
from cleave.api.faults import format_faults
from cleave.api.model import ConfigMapKeyRef, ModelConfig
from cleave.api.pool import InstancePool
from cleave.controller.cluster import objects
from cleave.controller.cluster.apply import ChildrenByName
from cleave.controller.cluster.objects import ObservedChild, ObservedNode, ObservedPod
from cleave.controller.cluster.reported_model import apply_config, apply_report, needs_hub
from cleave.manifests.credentials import name_accounts
from cleave.manifests.gang import POD_GROUP
from cleave.manifests.labels import (
    COMPONENT,
    DEPLOYMENT,
    GATEWAY,
    NODE_WORKER,
    WORKER,
    Manifest,
    get_gateway_name,
)
from cleave.perf.model import model_source
from cleave.perf.model.hf_config import ModelConfigError
from cleave.planner.resolved_deployment import ResolvedDeployment, resolve_in_cluster

DEPLOYMENTS = "LLMDeployment"
POOLS = "InstancePool"
_PODS = "Pod"
_NODES = "Node"
_QUOTAS = "ResourceQuota"

_METADATA_FIELDS = (
    "name", "namespace", "uid", "resourceVersion", "generation", "labels", "creationTimestamp",
    "deletionTimestamp", "deletionGracePeriodSeconds", "finalizers", "ownerReferences",
)  # fmt: skip
"""Metadata fields that are cached."""
_MAX_TOMBSTONES = 10_000


class ResourceKey(NamedTuple):
    """Identifies an object; those of deployments and pools are reconciled."""

    kind: str
    namespace: str
    name: str


@dataclass(frozen=True)
class CachedResource:
    """The cached state of an LLMDeployment or InstancePool."""

    resource: LLMDeployment | InstancePool | None
    """The parsed object without its status; None: it is invalid."""
    meta: Manifest
    status: Manifest = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    """Why it is invalid, one line each; an older version of Cleave may have admitted it."""
    config_reference: ConfigMapKeyRef | None = None
    """Of a deployment: where its model's config.json is. Once that is read, the resource has it."""
    model_fault: str = ""
    """Why it has not been read; empty: it has, or there is no reference."""

    @cached_property
    def resolved(self) -> ResolvedDeployment:
        """A valid deployment with what follows from its spec."""
        assert isinstance(self.resource, LLMDeployment)
        return resolve_in_cluster(self.resource)


@dataclass(frozen=True, slots=True)
class ReadConfigMap:
    """The ConfigMap with a deployment's config.json of its model, as it was read."""

    name: str
    data: Mapping[str, str] = field(default_factory=dict)
    fault: str = ""
    """Why there is none; empty: it was read."""
    is_missing: bool = False
    """It does not exist, which is no fault where it is optional."""


class _HubConfig(NamedTuple):
    """What Hugging Face has about a deployment's model."""

    source: str
    revision: str | None
    config: Mapping[str, object]


class GpuQuota(NamedTuple):
    """A ResourceQuota that bounds the GPUs of a namespace."""

    name: str
    num_gpus: int


class _Gateway(NamedTuple):
    """A gateway's pod."""

    ip: str
    """Empty: not assigned yet."""
    start_fault: str
    """Why the kubelet cannot start it; empty: it can."""
    wait: str
    """What its start waits for; empty: nothing."""


class ObjectCache:
    """The last known version of every object in the cluster."""

    def __init__(self) -> None:
        self._versions: dict[ResourceKey, tuple[str, int]] = {}
        self._tombstones: dict[str, None] = {}
        self._resources: dict[ResourceKey, CachedResource] = {}
        self._pods: dict[ResourceKey, ObservedPod] = {}
        self._pods_of: dict[ResourceKey, dict[str, ObservedPod]] = defaultdict(dict)
        self._gateways: dict[ResourceKey, dict[str, _Gateway]] = defaultdict(dict)
        self._pools_of: dict[ResourceKey, dict[str, None]] = defaultdict(dict)
        self._children: dict[str, dict[tuple[str, str], ObservedChild]] = defaultdict(dict)
        self._config_maps: dict[ResourceKey, ReadConfigMap] = {}
        self._hub_configs: dict[ResourceKey, _HubConfig] = {}
        self._quotas: dict[ResourceKey, int] = {}
        self.nodes: dict[str, ObservedNode] = {}

    def upsert(self, manifest: Manifest) -> set[ResourceKey]:
        """Cache an object; returns the keys to reconcile."""
        if manifest["kind"] == POD_GROUP:
            # Nothing depends on it, and nothing watches its end.
            return set()
        key, uid, version = _build_key(manifest), *_get_version(manifest)
        cached_uid, cached_version = self._versions.get(key, ("", -1))
        if uid in self._tombstones or (uid == cached_uid and version < cached_version):
            return set()
        affected = self._remove(key) if cached_uid and uid != cached_uid else set()
        self._versions[key] = uid, version
        return affected | self._upsert(key, manifest)

    def delete(self, manifest: Manifest) -> set[ResourceKey]:
        """Forget a deleted object; returns the keys to reconcile."""
        key, (uid, _) = _build_key(manifest), _get_version(manifest)
        self._add_tombstone(uid)
        if self._versions.get(key, ("", 0))[0] != uid:
            return set()
        return self._remove(key)

    def delete_missing(
        self, kind: str, listed: Mapping[tuple[str, str], str], before: int
    ) -> set[ResourceKey]:
        """Forget objects of a kind that a list (uid by namespace and name) lacks.

        `before` is the version of the list: objects with a newer version may exist. Returns the
        keys to reconcile.
        """
        affected: set[ResourceKey] = set()
        for key, (uid, version) in list(self._versions.items()):
            is_listed = listed.get((key.namespace, key.name)) == uid
            if key.kind == kind and not is_listed and version <= before:
                self._add_tombstone(uid)
                affected |= self._remove(key)
        return affected

    def get_version(self, kind: str, namespace: str, name: str) -> int:
        """Resource version of the cached object; -1: it is not cached."""
        return self._versions.get(ResourceKey(kind, namespace, name), ("", -1))[1]

    def list_resources(self) -> Iterator[ResourceKey]:
        """Yield the keys of everything that is reconciled."""
        yield from list(self._resources)

    def get(self, key: ResourceKey) -> CachedResource | None:
        """Return a deployment or pool; None: it is not cached."""
        return self._resources.get(key)

    def set_config_map(self, deployment: ResourceKey, read: ReadConfigMap) -> None:
        """Give a deployment the ConfigMap with its model's config.json as it was read now."""
        if deployment in self._resources:
            self._config_maps[deployment] = read
            self._resources[deployment] = _with_config_map(self._resources[deployment], read)
            self._apply_hub_config(deployment)

    def set_hub_config(self, deployment: ResourceKey, config: Mapping[str, object]) -> None:
        """Give a deployment the config.json that Hugging Face has of its model."""
        cached = self._resources.get(deployment)
        if cached is not None and isinstance(cached.resource, LLMDeployment):
            model = cached.resource.spec.model
            self._hub_configs[deployment] = _HubConfig(model.source, model.revision, config)
            self._apply_hub_config(deployment)

    def find_gpu_quota(self, namespace: str) -> GpuQuota | None:
        """Return the tightest ResourceQuota for GPUs of a namespace; None: there is none."""
        found = (
            GpuQuota(key.name, num_gpus)
            for key, num_gpus in self._quotas.items()
            if key.namespace == namespace
        )
        return min(found, key=lambda quota: (quota.num_gpus, quota.name), default=None)

    def list_pods(self, key: ResourceKey) -> tuple[ObservedPod, ...]:
        """Return the worker pods of a pool or deployment, oldest first."""
        pods = self._pods_of.get(key, {}).values()
        return tuple(sorted(pods, key=lambda pod: (pod.created_s, pod.name)))

    def list_pools(self, deployment: ResourceKey) -> list[CachedResource]:
        """Return the pools of a deployment, by name."""
        names = sorted(self._pools_of.get(deployment, {}))
        return [self._resources[ResourceKey(POOLS, deployment.namespace, name)] for name in names]

    def get_uid(self, key: ResourceKey) -> str:
        """Return the uid of a deployment or pool; empty: it is not cached."""
        cached = self._resources.get(key)
        return str(cached.meta.get("uid", "")) if cached is not None else ""

    def list_owners(self, namespace: str, deployment: str) -> set[str]:
        """Return the uids of a deployment and of all pools that name it."""
        key = ResourceKey(DEPLOYMENTS, namespace, deployment)
        own = self._resources.get(key)
        owners = [*([own] if own is not None else []), *self.list_pools(key)]
        return {each.meta["uid"] for each in owners}

    def has_account(self, deployment: ResourceKey) -> bool:
        """Whether the account of a deployment's workers exists and is its own, or that of a pool
        which names it."""
        namespace, name = deployment.namespace, deployment.name
        accounts = name_accounts(namespace, name, self.get_uid(deployment))
        owners = map(self.get_children, self.list_owners(namespace, name))
        found = (children.get(("ServiceAccount", accounts.workers)) for children in owners)
        return any(child is not None and not child.deleting for child in found)

    def get_children(self, uid: str) -> ChildrenByName:
        """Return the objects that were created for the owner with this uid."""
        return self._children.get(uid, {})

    def list_gateways(self, deployment: ResourceKey) -> tuple[str, ...]:
        """Return the IP addresses of the deployment's gateway pods."""
        return tuple(
            sorted(pod.ip for pod in self._gateways.get(deployment, {}).values() if pod.ip)
        )

    def find_gateway_fault(self, deployment: ResourceKey) -> str:
        """Return why the kubelet cannot start one of the deployment's gateways; empty: it can."""
        pods = sorted(self._gateways.get(deployment, {}).items())
        return next((f"{name}: {pod.start_fault}" for name, pod in pods if pod.start_fault), "")

    def find_gateway_wait(self, deployment: ResourceKey) -> str:
        """Return what the start of one of the deployment's gateways waits for; empty: nothing."""
        pods = sorted(self._gateways.get(deployment, {}).items())
        return next((pod.wait for _, pod in pods if pod.wait), "")

    def count(self) -> dict[str, int]:
        """Return the number of objects by kind."""
        counts: dict[str, int] = defaultdict(int)
        for key in self._versions:
            counts[key.kind] += 1
        return dict(counts)

    def _upsert(self, key: ResourceKey, manifest: Manifest) -> set[ResourceKey]:
        if key.kind in (DEPLOYMENTS, POOLS):
            return self._upsert_resource(key, manifest)
        if key.kind == _NODES:
            return self._upsert_node(manifest)
        if key.kind == _QUOTAS:
            return self._set_quota(key, objects.find_gpu_quota(manifest))
        if key.kind == _PODS:
            return self._upsert_pod(key, manifest)
        return self._upsert_child(manifest)

    def _upsert_resource(self, key: ResourceKey, manifest: Manifest) -> set[ResourceKey]:
        self._resources[key] = _parse(manifest)
        if key.kind == DEPLOYMENTS:
            self._upsert_reference(key)
            self._apply_hub_config(key)
            return {key}
        deployment = str(manifest["spec"].get("deployment", ""))
        owner = ResourceKey(DEPLOYMENTS, key.namespace, deployment)
        self._pools_of[owner][key.name] = None
        return {key, *self._filter_cached([owner])}

    def _upsert_reference(self, key: ResourceKey) -> None:
        """Keep what was read for a deployment that still refers to the same ConfigMap."""
        cached, read = self._resources[key], self._config_maps.get(key)
        reference = cached.config_reference
        if read is None or reference is None or read.name != reference.name:
            self._config_maps.pop(key, None)
        else:
            self._resources[key] = _with_config_map(cached, read)

    def _apply_hub_config(self, key: ResourceKey) -> None:
        """Keep what Hugging Face has for a deployment that still needs it for the same model."""
        cached, read = self._resources[key], self._hub_configs.get(key)
        if read is None or not isinstance(cached.resource, LLMDeployment):
            return
        model = cached.resource.spec.model
        if (model.source, model.revision) != (read.source, read.revision):
            del self._hub_configs[key]
        elif needs_hub(cached.resource):
            changed = apply_config(cached.resource, read.config)
            self._resources[key] = replace(cached, resource=changed)

    def _upsert_node(self, manifest: Manifest) -> set[ResourceKey]:
        node = objects.parse_node(manifest)
        # A node's heartbeat is a change as well; no decision depends on it.
        cached = self.nodes.get(node.name)
        if cached == node:
            return set()
        self.nodes[node.name] = node
        if not cached or replace(cached, ready=node.ready, schedulable=node.schedulable) != node:
            return set(self._resources)
        # Its GPUs are the same, so only pools with pods on this node are affected.
        pools = (_list_owners(pod)[0] for pod in self._pods.values() if pod.node == node.name)
        return self._filter_cached(pools)

    def _set_quota(self, key: ResourceKey, num_gpus: int | None) -> set[ResourceKey]:
        """Its `status.used` changes with every pod; no decision depends on that."""
        if self._quotas.get(key) == num_gpus:
            return set()
        if num_gpus is None:
            del self._quotas[key]
        else:
            self._quotas[key] = num_gpus
        return {
            each
            for each in self._resources
            if (each.kind, each.namespace) == (DEPLOYMENTS, key.namespace)
        }

    def _upsert_pod(self, key: ResourceKey, manifest: Manifest) -> set[ResourceKey]:
        labels = manifest["metadata"].get("labels", {})
        deployment = ResourceKey(DEPLOYMENTS, key.namespace, labels.get(DEPLOYMENT, ""))
        if labels.get(COMPONENT) == GATEWAY:
            return self._upsert_gateway(key, deployment, manifest)
        is_worker = labels.get(COMPONENT) in (WORKER, NODE_WORKER)
        pod = objects.parse_pod(manifest) if is_worker else None
        if pod is None or self._pods.get(key) == pod:
            return set()
        previous = self._pods.get(key)
        old_owners = [*_list_owners(previous)] if previous else []
        self._pods[key] = pod
        owners = _list_owners(pod)
        for owner in old_owners:
            self._pods_of[owner].pop(pod.name, None)
        for owner in owners:
            self._pods_of[owner][pod.name] = pod
        return self._filter_cached({*old_owners, *owners})

    def _upsert_gateway(
        self, key: ResourceKey, deployment: ResourceKey, manifest: Manifest
    ) -> set[ResourceKey]:
        if not _is_of_gateway(manifest["metadata"], deployment.name):
            return set()
        status = manifest.get("status", {})
        node = manifest.get("spec", {}).get("nodeName", "")
        reason = "" if node else objects.find_unschedulable_reason(status)
        is_pending = bool(node) and status.get("phase", "Pending") == "Pending"
        pod = _Gateway(
            status.get("podIP", ""),
            objects.find_start_fault(status),
            objects.describe_wait(key.name, reason, is_pending),
        )
        before = self.find_gateway_fault(deployment), self.find_gateway_wait(deployment)
        self._gateways[deployment][key.name] = pod
        # Its address matters only to the next scrape; what is compared is part of the status.
        now = self.find_gateway_fault(deployment), self.find_gateway_wait(deployment)
        return set() if now == before else self._filter_cached([deployment])

    def _upsert_child(self, manifest: Manifest) -> set[ResourceKey]:
        child = objects.parse_child(manifest)
        affected: set[ResourceKey] = set()
        for owner in manifest["metadata"].get("ownerReferences", ()):
            children = self._children[owner["uid"]]
            if children.get((child.kind, child.name)) != child:
                children[child.kind, child.name] = child
                affected.add(ResourceKey(owner["kind"], child.namespace, owner["name"]))
        return self._filter_cached(affected)

    def _remove(self, key: ResourceKey) -> set[ResourceKey]:
        del self._versions[key]
        if key.kind in (DEPLOYMENTS, POOLS):
            removed = self._resources.pop(key, None)
            self._config_maps.pop(key, None)
            self._hub_configs.pop(key, None)
            self._children.pop(removed.meta.get("uid", "") if removed else "", None)
            owners = [each for each, pools in self._pools_of.items() if key.name in pools]
            for owner in owners if key.kind == POOLS else ():
                if owner.namespace == key.namespace:
                    self._pools_of[owner].pop(key.name, None)
            return {key, *self._filter_cached(owners)}
        if key.kind == _NODES:
            self.nodes.pop(key.name, None)
            return set(self._resources)
        if key.kind == _QUOTAS:
            return self._set_quota(key, None)
        if pod := self._pods.pop(key, None):
            owners = _list_owners(pod)
            for owner in owners:
                self._pods_of[owner].pop(pod.name, None)
            return self._filter_cached(owners)
        return self._remove_child(key)

    def _remove_child(self, key: ResourceKey) -> set[ResourceKey]:
        affected: set[ResourceKey] = set()
        for deployment, gateways in self._gateways.items():
            if deployment.namespace == key.namespace:
                gateway = gateways.pop(key.name, None)
                affected |= (
                    {deployment} if gateway and (gateway.start_fault or gateway.wait) else set()
                )
        for uid, children in self._children.items():
            child = children.get((key.kind, key.name))
            if child is not None and child.namespace == key.namespace:
                del children[key.kind, key.name]
                owners = self._resources.items()
                affected |= {owner for owner, each in owners if each.meta.get("uid") == uid}
        return affected

    def _filter_cached(self, keys: Iterable[ResourceKey]) -> set[ResourceKey]:
        return {key for key in keys if key in self._resources}

    def _add_tombstone(self, uid: str) -> None:
        self._tombstones[uid] = None
        while len(self._tombstones) > _MAX_TOMBSTONES:
            del self._tombstones[next(iter(self._tombstones))]


def _is_of_gateway(meta: Manifest, deployment: str) -> bool:
    """Whether a pod belongs to the ReplicaSet of a deployment's gateway: labels alone prove nothing
    about a pod, and the operator reads pages from gateways."""
    hashed = meta.get("labels", {}).get("pod-template-hash", "")
    name = f"{get_gateway_name(deployment)}-{hashed}"
    owners = meta.get("ownerReferences", ())
    return any(
        each.get("controller") and (each["kind"], each["name"]) == ("ReplicaSet", name)
        for each in owners
    )


def _list_owners(pod: ObservedPod) -> list[ResourceKey]:
    deployment = ResourceKey(DEPLOYMENTS, pod.namespace, pod.deployment)
    return [ResourceKey(POOLS, pod.namespace, pod.pool), deployment]


def _build_key(manifest: Manifest) -> ResourceKey:
    meta = manifest["metadata"]
    return ResourceKey(manifest["kind"], meta.get("namespace", ""), meta["name"])


def _get_version(manifest: Manifest) -> tuple[str, int]:
    meta = manifest["metadata"]
    version = str(meta.get("resourceVersion", ""))
    return meta.get("uid", ""), int(version) if version.isdigit() else 0


def _parse(manifest: Manifest) -> CachedResource:
    meta = {name: each for name, each in manifest["metadata"].items() if name in _METADATA_FIELDS}
    kind = LLMDeployment if manifest["kind"] == DEPLOYMENTS else InstancePool
    document = {name: manifest[name] for name in ("apiVersion", "kind")}
    document |= {"metadata": meta, "spec": manifest.get("spec", {})}
    status = manifest.get("status", {})
    try:
        # Parse from JSON: the strict types accept strings for dates and enums there only.
        parsed = kind.model_validate_json(json.dumps(document), by_alias=True, by_name=False)
    except ValidationError as error:
        return CachedResource(None, meta, status, tuple(format_faults(error, kind)))
    if isinstance(parsed, LLMDeployment):
        parsed = apply_report(parsed, status)
    config = parsed.spec.model.config if isinstance(parsed, LLMDeployment) else None
    reference = config.config_map_key_ref if config else None
    unread = f"ConfigMap {reference.name} has not been read yet" if reference else ""
    return CachedResource(parsed, meta, status, (), reference, unread)


def _with_config_map(cached: CachedResource, read: ReadConfigMap) -> CachedResource:
    """The deployment with its model's config.json from the ConfigMap; without, where it is not
    usable; with what an engine has reported, where it is optional and missing."""
    if cached.config_reference is None or not isinstance(cached.resource, LLMDeployment):
        return cached
    spec = cached.resource.spec
    declared = ModelConfig(config_map_key_ref=cached.config_reference)
    model, fault = spec.model.model_copy(update={"config": declared}), read.fault
    if not fault or (read.is_missing and cached.config_reference.optional):
        fault = ""
        try:
            model = model_source.with_config_map(model, read.data)
        except ModelConfigError as error:
            fault = str(error)
    changed = cached.resource.model_copy(update={"spec": spec.model_copy(update={"model": model})})
    return replace(cached, resource=apply_report(changed, cached.status), model_fault=fault)
