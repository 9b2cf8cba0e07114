"""Gangs: the pods of an instance that spans nodes get their nodes together or not at all. Pure.

Called by the pool's reconcile for the pods that the operator creates itself; LeaderWorkerSet makes
gangs of its own. What the pods name decides who admits them: a queue of Kueue, which takes labels
and annotations, and a scheduler, Volcano's or Kubernetes' own, which takes a PodGroup. A PodGroup
belongs to the leader's pod and is created once that exists; schedulers hold the pod back until
then.
"""

from cleave.api.pods.worker_template import WorkerTemplate
from cleave.api.pool import InstancePool
from cleave.manifests.labels import Manifest, build_object, build_worker_labels

POD_GROUP = "PodGroup"
POD_GROUP_VERSION = "scheduling.k8s.io/v1beta1"
"""Of Kubernetes' own, from 1.37 on (KEP 4671)."""
_VOLCANO_VERSION = "scheduling.volcano.sh/v1beta1"
_VOLCANO = "volcano"
_DEFAULT_SCHEDULERS = (None, "default-scheduler")
_VOLCANO_GROUPS = ("scheduling.k8s.io/group-name", "scheduling.volcano.sh/group-name")
"""Annotations of pods: Volcano's scheduler and its controllers read different ones."""
_VOLCANO_QUEUE = "scheduling.volcano.sh/queue-name"

_KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
_KUEUE_GROUP = "kueue.x-k8s.io/pod-group-name"
_KUEUE_COUNT = "kueue.x-k8s.io/pod-group-total-count"
_KUEUE_RETRIABLE = "kueue.x-k8s.io/retriable-in-group"
"""Annotation. A pod that has ended is not replaced in its group: the whole instance is, by one with
another name. So the group finishes when all its pods have ended; otherwise Kueue would keep them,
and their quota, for replacements."""


def find_pod_group_version(template: WorkerTemplate, *, has_pod_groups: bool) -> str:
    """The version of the PodGroups that the scheduler of these pods takes; empty: it takes none.
    `has_pod_groups`: the cluster has Kubernetes' own."""
    if template.scheduler_name == _VOLCANO:
        return _VOLCANO_VERSION
    is_default = template.scheduler_name in _DEFAULT_SCHEDULERS
    return POD_GROUP_VERSION if is_default and has_pod_groups else ""


def add_gang(
    pod: Manifest, pool: InstancePool, instance: str, *, has_pod_groups: bool = False
) -> Manifest:
    """A pod of an instance as a member of its gang; unchanged where the instance is one pod."""
    if pool.spec.nodes == 1:
        return pod
    meta, spec = pod["metadata"], pod["spec"]
    labels, annotations = dict(meta["labels"]), dict(meta.get("annotations", {}))
    if _KUEUE_QUEUE in labels:
        labels[_KUEUE_GROUP] = instance
        annotations |= {_KUEUE_COUNT: str(pool.spec.nodes), _KUEUE_RETRIABLE: "false"}
    version = find_pod_group_version(pool.spec.template, has_pod_groups=has_pod_groups)
    if version == _VOLCANO_VERSION:
        annotations |= dict.fromkeys(_VOLCANO_GROUPS, instance)
    elif version:
        spec = {**spec, "schedulingGroup": {"podGroupName": instance}}
    meta = {**meta, "labels": labels, **({"annotations": annotations} if annotations else {})}
    return {**pod, "metadata": meta, "spec": spec}


def build_pod_group(
    pool: InstancePool, leader: str, uid: str, *, has_pod_groups: bool = False
) -> Manifest | None:
    """The PodGroup of an instance, which its leader's pod owns; None: its scheduler takes none."""
    template, nodes = pool.spec.template, pool.spec.nodes
    version = find_pod_group_version(template, has_pod_groups=has_pod_groups)
    if nodes == 1 or not version:
        return None
    spec: Manifest = {"schedulingPolicy": {"gang": {"minCount": nodes}}}
    if version == _VOLCANO_VERSION:
        spec = {"minMember": nodes}
        if queue := template.annotations.get(_VOLCANO_QUEUE):
            spec["queue"] = queue
    if template.priority_class_name:
        spec["priorityClassName"] = template.priority_class_name
    labels = build_worker_labels(pool, leader)
    group = build_object(version, POD_GROUP, leader, pool.namespace, labels, spec=spec)
    link = {"apiVersion": "v1", "kind": "Pod", "name": leader, "uid": uid}
    group["metadata"]["ownerReferences"] = [link]
    return group
