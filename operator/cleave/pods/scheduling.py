"""Which nodes a worker may, must and had better run on. Pure; called by the pods' builders.

Instances of a cell (DistServe's Algorithm 2) must share a node or NVLink clique with the same
stages of the others, so that their KV does not leave it. Others (Algorithm 1) had better be on
nodes that reach each other fast, and not all on one that may be lost.
"""

from cleave.api.pool import Colocation, InstancePool, InstancePoolSpec
from cleave.api.role import Role
from cleave.pods import spread
from cleave.pods.labels import (
    COMPONENT,
    DEPLOYMENT,
    INSTANCE,
    POOL,
    REVISION,
    SEGMENT,
    WORKER,
    Manifest,
)
from cleave.pods.resources import GPU_PRODUCT, Device

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


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
    if affinity := _affinity(pool, labels):
        fields["affinity"] = affinity
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


def _affinity(pool: InstancePool, labels: dict[str, str]) -> Manifest:
    spec = pool.spec
    affinity = _in_cell(spec, labels) if SEGMENT in labels else {}
    if spec.nodes > 1:
        near = spread.linked({INSTANCE: labels[INSTANCE]})
    elif SEGMENT not in labels and spec.role is not Role.MIXED:
        near = spread.near({DEPLOYMENT: spec.deployment, COMPONENT: WORKER})
    else:
        return affinity
    return {**affinity, "podAffinity": {**affinity.get("podAffinity", {}), _PREFERRED: near}}


def _in_cell(spec: InstancePoolSpec, labels: dict[str, str]) -> Manifest:
    """With the others of the cell; where they are yet to come, in a domain without other cells.

    The scheduler takes pods one by one: two cells begun in one domain could both lack room there.
    Other revisions may share it, or a roll-out would need as many domains again.
    """
    stated = spec.colocation or Colocation(per_cell=1)
    own = {DEPLOYMENT: spec.deployment, SEGMENT: labels[SEGMENT]}
    others = spread.away({**own, REVISION: spec.revision}, SEGMENT, stated.topology_key)
    return {
        "podAffinity": {_REQUIRED: spread.together(own, stated.topology_key)},
        "podAntiAffinity": (
            {_REQUIRED: [others]}
            if stated.exclusive
            else {_PREFERRED: [{"weight": 100, "podAffinityTerm": others}]}
        ),
    }


def _gpu_selector(pool: InstancePool, device: Device) -> dict[str, str]:
    """The label of nodes with the pool's kind of GPU, as NVIDIA's feature discovery writes it."""
    if pool.spec.gpu is None or device != "gpu":
        return {}
    return {GPU_PRODUCT: spread.product(pool.spec.gpu)}
