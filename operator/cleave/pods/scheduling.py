"""Which nodes a worker may, must and had better run on. Pure; called by the pods' builders.

Instances of a cell (DistServe's Algorithm 2) must share a node or NVLink clique with the same
stages of the others: KV moves over its links only. Others (Algorithm 1) had better be on nodes that
reach each other fast, and not all on one that may be lost.
"""

from cleave.api.pool import Colocation, InstancePool
from cleave.api.role import Role
from cleave.pods import spread
from cleave.pods.labels import COMPONENT, DEPLOYMENT, INSTANCE, POOL, SEGMENT, WORKER, Manifest
from cleave.pods.resources import GPU_PRODUCT, Device


def scheduling(pool: InstancePool, labels: dict[str, str], device: Device) -> Manifest:
    """Fields of the spec of a pod with `labels`."""
    template = pool.spec.template
    fields: Manifest = {}
    if selector := {**_gpu_selector(pool, device), **template.node_selector}:
        fields["nodeSelector"] = selector
    if template.tolerations:
        fields["tolerations"] = [
            toleration.model_dump(mode="json", exclude_none=True)
            for toleration in template.tolerations
        ]
    if template.runtime_class_name:
        fields["runtimeClassName"] = template.runtime_class_name
    if affinity := _pod_affinity(pool, labels):
        fields["affinity"] = {"podAffinity": affinity}
    if SEGMENT not in labels and pool.spec.nodes == 1:
        fields["topologySpreadConstraints"] = spread.apart({POOL: pool.name})
    return fields


def segment(pool: InstancePool, cell: int, rank: int) -> str:
    """Name of what must share a domain: a cell's pods that hold the same stages.

    Other revisions have cells of their own: during a roll-out they find no room beside the old.
    """
    spec = pool.spec
    domain = (spec.colocation or Colocation(per_cell=1)).topology_key
    # Within a clique all nodes of a cell reach each other; otherwise every rank has its own node.
    stages = f"-{rank}" if spec.nodes > 1 and domain == spread.HOSTNAME else ""
    return f"{spec.revision}-{cell}{stages}"


def _pod_affinity(pool: InstancePool, labels: dict[str, str]) -> Manifest:
    spec = pool.spec
    preferred: list[Manifest] = []
    if spec.nodes > 1:
        preferred += spread.linked({INSTANCE: labels[INSTANCE]})
    affinity: Manifest = {}
    if spec.colocation and SEGMENT in labels:
        selector = {DEPLOYMENT: spec.deployment, SEGMENT: labels[SEGMENT]}
        required = spread.together(selector, spec.colocation.topology_key)
        affinity["requiredDuringSchedulingIgnoredDuringExecution"] = required
    elif spec.role is not Role.MIXED and not preferred:
        preferred += spread.near({DEPLOYMENT: spec.deployment, COMPONENT: WORKER})
    if preferred:
        affinity["preferredDuringSchedulingIgnoredDuringExecution"] = preferred
    return affinity


def _gpu_selector(pool: InstancePool, device: Device) -> dict[str, str]:
    """The label of nodes with the pool's kind of GPU, as NVIDIA's feature discovery writes it."""
    if pool.spec.gpu is None or device != "gpu":
        return {}
    return {GPU_PRODUCT: spread.product(pool.spec.gpu)}
