"""The index: what was last seen of every object, and what follows from its change.

Filled by handlers and by the answers to the operator's own writes, so that a decision never forgets
what the one before it did. What is hard: events come late, twice or not at all. An older version
never replaces a newer one, what was seen to go does not come back, and `Store.missing` finds what
has gone unseen.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pydantic import ValidationError

from cleave.api.deployment import LLMDeployment
from cleave.api.faults import fault_lines
from cleave.api.pool import InstancePool
from cleave.controller import observed
from cleave.controller.observed import ObservedChild, ObservedNode, ObservedPod
from cleave.controller.wanted import Children
from cleave.pods.labels import COMPONENT, DEPLOYMENT, FOLLOWER, GATEWAY, WORKER, Manifest

DEPLOYMENTS = "LLMDeployment"
POOLS = "InstancePool"
_PODS = "Pod"
_NODES = "Node"

_META = (
    "name", "namespace", "uid", "resourceVersion", "generation", "labels", "creationTimestamp",
    "deletionTimestamp", "deletionGracePeriodSeconds", "finalizers", "ownerReferences",
)  # fmt: skip
"""What is kept of metadata."""
_MOST_GRAVES = 10_000


class Key(NamedTuple):
    """An object that is reconciled."""

    kind: str
    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class Seen:
    """An LLMDeployment or InstancePool as it was last seen."""

    resource: LLMDeployment | InstancePool | None
    """Without its status; None: faulty."""
    meta: Manifest
    status: Manifest = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    """What is wrong with it, one line each; older versions of Cleave may have let it in."""


class _Place(NamedTuple):
    kind: str
    namespace: str
    name: str


class Store:
    """All that is known of the cluster."""

    def __init__(self) -> None:
        self._versions: dict[_Place, tuple[str, int]] = {}
        self._graves: dict[str, None] = {}
        self._resources: dict[Key, Seen] = {}
        self._pods: dict[_Place, ObservedPod] = {}
        self._pods_of: dict[Key, dict[str, ObservedPod]] = defaultdict(dict)
        self._gateways: dict[Key, dict[str, str]] = defaultdict(dict)
        self._pools_of: dict[Key, dict[str, None]] = defaultdict(dict)
        self._children: dict[str, dict[tuple[str, str], ObservedChild]] = defaultdict(dict)
        self.nodes: dict[str, ObservedNode] = {}

    def put(self, manifest: Manifest) -> set[Key]:
        """Remember an object; the keys to look at again."""
        place, uid, version = _place(manifest), *_version(manifest)
        known_uid, known_version = self._versions.get(place, ("", -1))
        if uid in self._graves or (uid == known_uid and version < known_version):
            return set()
        affected: set[Key] = set()
        if known_uid and uid != known_uid:
            affected = self._remove(place)
        self._versions[place] = uid, version
        return affected | self._keep(place, manifest)

    def drop(self, manifest: Manifest) -> set[Key]:
        """Forget an object that has gone; the keys to look at again."""
        place, (uid, _) = _place(manifest), _version(manifest)
        self._bury(uid)
        if self._versions.get(place, ("", 0))[0] != uid:
            return set()
        return self._remove(place)

    def missing(self, kind: str, listed: Mapping[tuple[str, str], str], before: int) -> set[Key]:
        """Forget objects of a kind that a list (uid by namespace and name) does not hold.

        `before` is the version of the list: what is newer than it may well be there.
        """
        affected: set[Key] = set()
        for place, (uid, version) in list(self._versions.items()):
            is_there = listed.get((place.namespace, place.name)) == uid
            if place.kind == kind and not is_there and version <= before:
                self._bury(uid)
                affected |= self._remove(place)
        return affected

    def version(self, kind: str, namespace: str, name: str) -> int:
        """Version of an object that was last seen; -1: none was."""
        return self._versions.get(_Place(kind, namespace, name), ("", -1))[1]

    def resources(self) -> Iterator[Key]:
        """Everything that is reconciled."""
        yield from list(self._resources)

    def seen(self, key: Key) -> Seen | None:
        """A deployment or pool."""
        return self._resources.get(key)

    def pods(self, key: Key) -> tuple[ObservedPod, ...]:
        """Worker pods of a pool or deployment, the oldest first."""
        found = self._pods_of.get(key, {}).values()
        return tuple(sorted(found, key=lambda pod: (pod.created_s, pod.name)))

    def pools(self, deployment: Key) -> list[Seen]:
        """Pools of a deployment, by name."""
        names = sorted(self._pools_of.get(deployment, {}))
        return [self._resources[Key(POOLS, deployment.namespace, name)] for name in names]

    def children(self, uid: str) -> Children:
        """What was made for the object with this uid."""
        return self._children.get(uid, {})

    def gateways(self, deployment: Key) -> tuple[str, ...]:
        """Addresses of the deployment's gateway pods."""
        return tuple(sorted(ip for ip in self._gateways.get(deployment, {}).values() if ip))

    def count(self) -> dict[str, int]:
        """Objects by kind."""
        counted: dict[str, int] = defaultdict(int)
        for place in self._versions:
            counted[place.kind] += 1
        return dict(counted)

    def _keep(self, place: _Place, manifest: Manifest) -> set[Key]:
        if place.kind in (DEPLOYMENTS, POOLS):
            return self._keep_resource(place, manifest)
        if place.kind == _NODES:
            return self._keep_node(manifest)
        if place.kind == _PODS:
            return self._keep_pod(place, manifest)
        return self._keep_child(manifest)

    def _keep_resource(self, place: _Place, manifest: Manifest) -> set[Key]:
        key = Key(*place)
        self._resources[key] = _parsed(manifest)
        if place.kind == DEPLOYMENTS:
            return {key}
        owner = Key(DEPLOYMENTS, place.namespace, str(manifest["spec"].get("deployment", "")))
        self._pools_of[owner][place.name] = None
        return {key, *self._there([owner])}

    def _keep_node(self, manifest: Manifest) -> set[Key]:
        node = observed.node(manifest)
        # A node tells its heartbeat as a change; what is decided from it has not changed.
        known = self.nodes.get(node.name)
        if known == node:
            return set()
        self.nodes[node.name] = node
        if known is None or replace(known, ready=node.ready, schedulable=node.schedulable) != node:
            return set(self._resources)
        # What there is to plan with is the same; it concerns whoever has pods there.
        pools = (_owners(pod)[0] for pod in self._pods.values() if pod.node == node.name)
        return self._there(pools)

    def _keep_pod(self, place: _Place, manifest: Manifest) -> set[Key]:
        labels = manifest["metadata"].get("labels", {})
        deployment = Key(DEPLOYMENTS, place.namespace, labels.get(DEPLOYMENT, ""))
        if labels.get(COMPONENT) == GATEWAY:
            self._gateways[deployment][place.name] = manifest.get("status", {}).get("podIP", "")
            return set()
        is_worker = labels.get(COMPONENT) in (WORKER, FOLLOWER)
        pod = observed.pod(manifest) if is_worker else None
        if pod is None or self._pods.get(place) == pod:
            return set()
        before = self._pods.get(place)
        left = [*_owners(before)] if before else []
        self._pods[place] = pod
        owners = _owners(pod)
        for owner in left:
            self._pods_of[owner].pop(pod.name, None)
        for owner in owners:
            self._pods_of[owner][pod.name] = pod
        return self._there({*left, *owners})

    def _keep_child(self, manifest: Manifest) -> set[Key]:
        child = observed.child(manifest)
        found: set[Key] = set()
        for owner in manifest["metadata"].get("ownerReferences", ()):
            known = self._children[owner["uid"]]
            if known.get((child.kind, child.name)) != child:
                known[child.kind, child.name] = child
                found.add(Key(owner["kind"], child.namespace, owner["name"]))
        return self._there(found)

    def _remove(self, place: _Place) -> set[Key]:
        del self._versions[place]
        key = Key(*place)
        if place.kind in (DEPLOYMENTS, POOLS):
            gone = self._resources.pop(key, None)
            self._children.pop(gone.meta.get("uid", "") if gone else "", None)
            owners = [k for k, pools in self._pools_of.items() if place.name in pools]
            for owner in owners if place.kind == POOLS else ():
                if owner.namespace == place.namespace:
                    self._pools_of[owner].pop(place.name, None)
            return {key, *self._there(owners)}
        if place.kind == _NODES:
            self.nodes.pop(place.name, None)
            return set(self._resources)
        if pod := self._pods.pop(place, None):
            owners = _owners(pod)
            for owner in owners:
                self._pods_of[owner].pop(pod.name, None)
            return self._there(owners)
        return self._remove_child(place)

    def _remove_child(self, place: _Place) -> set[Key]:
        for key, gateways in self._gateways.items():
            if key.namespace == place.namespace:
                gateways.pop(place.name, None)
        affected: set[Key] = set()
        for uid, children in self._children.items():
            child = children.get((place.kind, place.name))
            if child is not None and child.namespace == place.namespace:
                del children[place.kind, place.name]
                owners = self._resources.items()
                affected |= {key for key, seen in owners if seen.meta.get("uid") == uid}
        return affected

    def _there(self, keys: Iterable[Key]) -> set[Key]:
        return {key for key in keys if key in self._resources}

    def _bury(self, uid: str) -> None:
        self._graves[uid] = None
        while len(self._graves) > _MOST_GRAVES:
            del self._graves[next(iter(self._graves))]


def _owners(pod: ObservedPod) -> list[Key]:
    return [Key(POOLS, pod.namespace, pod.pool), Key(DEPLOYMENTS, pod.namespace, pod.deployment)]


def _place(manifest: Manifest) -> _Place:
    meta = manifest["metadata"]
    return _Place(manifest["kind"], meta.get("namespace", ""), meta["name"])


def _version(manifest: Manifest) -> tuple[str, int]:
    meta = manifest["metadata"]
    version = str(meta.get("resourceVersion", ""))
    return meta.get("uid", ""), int(version) if version.isdigit() else 0


def _parsed(manifest: Manifest) -> Seen:
    meta = {name: manifest["metadata"][name] for name in _META if name in manifest["metadata"]}
    kind = LLMDeployment if manifest["kind"] == DEPLOYMENTS else InstancePool
    document = {
        "apiVersion": manifest["apiVersion"],
        "kind": manifest["kind"],
        "metadata": meta,
        "spec": manifest.get("spec", {}),
    }
    status = manifest.get("status", {})
    try:
        # By way of JSON, as everywhere: strict types read Python's dates and enums otherwise.
        text = json.dumps(document)
        return Seen(kind.model_validate_json(text, by_alias=True, by_name=False), meta, status)
    except ValidationError as error:
        return Seen(None, meta, status, tuple(fault_lines(error, kind)))
