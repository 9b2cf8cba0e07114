"""An in-memory cluster that stores the operator's objects and behaves as Kubernetes.

Objects have uids, versions, generations, finalizers and owners; pods are scheduled while there is
room, become ready, end after their deletion, and may be lost. Watchers receive all changes.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any

from cleave.controller.cluster.actions import (
    Action,
    Apply,
    Create,
    Delete,
    Emit,
    ObjectReference,
    PatchStatus,
    Repurpose,
    RequestPlan,
    Requeue,
    SetFinalizers,
    SetLabels,
)
from cleave.controller.cluster.objects import format_timestamp
from cleave.manifests.labels import Manifest

Place = tuple[str, str, str]
MESSAGE = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."


class SmallCluster:
    def __init__(self, room: int = 1_000, now_s: float = 1_000_000.0) -> None:
        self.objects: dict[Place, Manifest] = {}
        self.watchers: list[Callable[[str, Manifest], None]] = []
        self.room = room
        self.now_s = now_s
        self.events: list[Emit] = []
        self.log: list[Action] = []
        self.refuses_orders = False
        """Whether agents refuse new roles."""
        self._number = 0

    def add(self, manifest: Manifest) -> Manifest:
        """Add an object of a user."""
        return self._apply(manifest)

    def get(self, kind: str, name: str, namespace: str = "default") -> Manifest | None:
        return self.objects.get((kind, namespace, name))

    def all(self, kind: str) -> list[Manifest]:
        return [each for (k, _, _), each in sorted(self.objects.items()) if k == kind]

    def edit(self, kind: str, name: str, **spec: Any) -> None:
        existing = self.objects[kind, "default", name]
        self._changed({**existing, "spec": {**existing["spec"], **spec}})

    def remove(self, kind: str, name: str) -> None:
        """Delete an object as `kubectl delete` does."""
        self._delete(Delete(ObjectReference(kind, "default", name)))

    def do(self, actions: Iterable[Action]) -> list[tuple[str, Manifest]]:
        """Execute `actions`; return the objects in the API server's responses."""
        answers: list[tuple[str, Manifest]] = []
        for action in actions:
            if not isinstance(action, Requeue | RequestPlan):
                self.log.append(action)
            match action:
                case Apply(manifest):
                    answers.append(("seen", self._apply(manifest)))
                case Create(manifest):
                    existing = self.objects.get(_place(manifest))
                    answers.append(("seen", existing or self._apply(manifest)))
                case Delete():
                    answers += self._delete(action)
                case Repurpose(target):
                    if not self.refuses_orders and (existing := self._same(target)):
                        answers.append(("seen", self._repurpose(existing, action)))
                case PatchStatus(target, status):
                    if existing := self._same(target):
                        written = self._changed({**existing, "status": status}, is_spec=False)
                        answers.append(("seen", written))
                case SetLabels(target):
                    if existing := self._same(target):
                        answers.append(("seen", self._set_labels(existing, action)))
                case SetFinalizers(target, finalizers, _):
                    answers += self._set_finalizers(target, finalizers)
                case Emit():
                    self.events.append(action)
        return copy.deepcopy(answers)

    def pods(self) -> list[Manifest]:
        return self.all("Pod")

    def schedule(self) -> None:
        """Assign pods to nodes while there is room; mark the others as unschedulable."""
        used = sum("nodeName" in pod["spec"] for pod in self.pods())
        for pod in sorted(self.pods(), key=lambda pod: int(pod["metadata"]["uid"][4:])):
            if "nodeName" in pod["spec"] or "deletionTimestamp" in pod["metadata"]:
                continue
            if used < self.room:
                used += 1
                self._changed({**pod, "spec": {**pod["spec"], "nodeName": "n1"}})
            elif not pod.get("status"):
                why = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
                status = {"phase": "Pending", "conditions": [{**why, "message": MESSAGE}]}
                self._changed({**pod, "status": status}, is_spec=False)

    def make_ready(self, pod: Manifest) -> None:
        if "nodeName" in pod["spec"] and "deletionTimestamp" not in pod["metadata"]:
            known = pod.get("status", {})
            since = known["startTime"] if "podIP" in known else format_timestamp(self.now_s)
            ready = {"type": "Ready", "status": "True", "lastTransitionTime": since}
            status = {
                "phase": "Running",
                "conditions": [ready],
                "podIP": "10.0.0.1",
                "startTime": since,
            }
            if known != status:
                self._changed({**pod, "status": status}, is_spec=False)

    def fail(self, pod: Manifest) -> None:
        """Set the phase of a pod to Failed."""
        self._changed({**pod, "status": {"phase": "Failed"}}, is_spec=False)

    def end(self, pod: Manifest) -> None:
        """Remove a pod that is being deleted."""
        if "deletionTimestamp" in pod["metadata"]:
            self._gone(pod)

    def lose(self, pod: Manifest) -> None:
        """Remove a pod that was not deleted, as if its node was lost."""
        self._gone(pod)

    def run_gateways(self) -> None:
        for each in self.all("Deployment"):
            count = each["spec"]["replicas"]
            status = {
                "observedGeneration": each["metadata"]["generation"],
                **dict.fromkeys(("replicas", "readyReplicas", "updatedReplicas"), count),
            }
            if each.get("status") != status:
                self._changed({**each, "status": status}, is_spec=False)

    def settle(self) -> None:
        """Schedule pods, make them ready, end deleted ones and run gateways."""
        self.schedule()
        for pod in self.pods():
            self.make_ready(pod)
            self.end(pod)
        self.run_gateways()

    def _same(self, target: ObjectReference) -> Manifest | None:
        existing = self.objects.get((target.kind, target.namespace, target.name))
        if existing is None or (target.uid and existing["metadata"]["uid"] != target.uid):
            return None
        return existing

    def _apply(self, manifest: Manifest) -> Manifest:
        existing = self.objects.get(_place(manifest))
        if existing is None:
            meta = {
                "generation": 0,
                **manifest["metadata"],
                "uid": self._next("uid-"),
                "creationTimestamp": format_timestamp(self.now_s),
            }
            return self._changed({**manifest, "metadata": meta})
        meta = {**existing["metadata"], **manifest["metadata"]}
        return self._changed({**existing, **manifest, "metadata": meta})

    def _delete(self, action: Delete) -> list[tuple[str, Manifest]]:
        existing = self._same(action.target)
        if existing is None:
            return []
        if existing["metadata"].get("finalizers") or (
            existing["kind"] == "Pod" and action.grace_s != 0
        ):
            if "deletionTimestamp" in existing["metadata"]:
                return [("seen", existing)]
            meta = {**existing["metadata"], "deletionTimestamp": format_timestamp(self.now_s)}
            return [("seen", self._changed({**existing, "metadata": meta}))]
        self._gone(existing)
        return [("gone", existing)]

    def _set_labels(self, pod: Manifest, action: SetLabels) -> Manifest:
        meta = pod["metadata"]
        for name in ("labels", "annotations"):
            meta = {**meta, name: {**meta.get(name, {}), **getattr(action, name)}}
        return self._changed({**pod, "metadata": meta})

    def _repurpose(self, pod: Manifest, order: Repurpose) -> Manifest:
        """Apply a merge patch: maps are merged, lists replaced."""
        meta, patch = pod["metadata"], order.metadata
        merged = {
            **meta,
            **patch,
            "labels": {**meta["labels"], **patch.get("labels", {})},
            "annotations": {**meta["annotations"], **patch.get("annotations", {})},
        }
        return self._changed({**pod, "metadata": merged})

    def _set_finalizers(
        self, target: ObjectReference, finalizers: tuple[str, ...]
    ) -> list[tuple[str, Manifest]]:
        existing = self._same(target)
        if existing is None:
            return []
        meta = {**existing["metadata"], "finalizers": list(finalizers)}
        if not finalizers and "deletionTimestamp" in meta:
            self._gone(existing)
            return [("gone", existing)]
        return [("seen", self._changed({**existing, "metadata": meta}, is_spec=False))]

    def _gone(self, manifest: Manifest) -> None:
        """Remove an object and all that it owns, as the garbage collector does."""
        if self.objects.pop(_place(manifest), None) is None:
            return
        self._notify("DELETED", manifest)
        uid = manifest["metadata"]["uid"]
        for each in list(self.objects.values()):
            owners = each["metadata"].get("ownerReferences", ())
            if any(owner["uid"] == uid for owner in owners):
                self._gone(each)

    def _changed(self, manifest: Manifest, *, is_spec: bool = True) -> Manifest:
        existing = self.objects.get(_place(manifest))
        meta = dict(manifest["metadata"])
        if is_spec and (existing is None or existing.get("spec") != manifest.get("spec")):
            meta["generation"] = meta.get("generation", 0) + 1
        manifest = copy.deepcopy({**manifest, "metadata": meta})
        if existing is not None and _content(existing) == _content(manifest):
            return existing
        manifest["metadata"]["resourceVersion"] = self._next("")
        self.objects[_place(manifest)] = manifest
        self._notify("MODIFIED" if existing else "ADDED", manifest)
        return manifest

    def _notify(self, kind: str, manifest: Manifest) -> None:
        for watcher in self.watchers:
            watcher(kind, copy.deepcopy(manifest))

    def _next(self, prefix: str) -> str:
        self._number += 1
        return f"{prefix}{self._number}"


def node(name: str = "n1", gpus: int = 8, product: str = "NVIDIA-H100-80GB-HBM3") -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "namespace": "",
            "uid": name,
            "labels": {"nvidia.com/gpu.product": product},
        },
        "spec": {},
        "status": {
            "allocatable": {"nvidia.com/gpu": str(gpus)},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def chat(**spec: Any) -> Manifest:
    """The manifest of an LLMDeployment with emulated engines."""
    return {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "chat", "namespace": "default"},
        "spec": {
            "model": "facebook/opt-13b",
            "slo": {"ttftMs": 400, "tpotMs": 40},
            "engine": {"type": "Emulated"},
            **spec,
        },
    }


def manual_placement(**replicas: int) -> Manifest:
    """A manual placement; `replicas`: instances by role."""
    return {"manual": [{"role": role, "replicas": n} for role, n in replicas.items()]}


def _place(manifest: Manifest) -> Place:
    meta = manifest["metadata"]
    return manifest["kind"], meta.get("namespace", ""), meta["name"]


def _content(manifest: Manifest) -> Manifest:
    meta = {k: v for k, v in manifest["metadata"].items() if k != "resourceVersion"}
    return {**manifest, "metadata": meta}
