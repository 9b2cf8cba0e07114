"""Scheduling fields of worker pods: node selector, affinity, tolerations. Pure.

Called by the pod builders. Instances of a cell (DistServe's Algorithm 2) must share a node or
NVLink clique with the same stages of the others, so that their KV does not leave it. Other
instances (Algorithm 1) should be on nodes with a fast network between them, and not all on one
node.
"""

from collections.abc import Mapping

from cleave.api.engine import EngineSpec, EngineType
from cleave.api.pool import Colocation, InstancePool, InstancePoolSpec
from cleave.api.role import Role
from cleave.manifests import topology
from cleave.manifests.labels import (
    COMPONENT,
    DEPLOYMENT,
    INSTANCE,
    POOL,
    REVISION,
    SEGMENT,
    WORKER,
    Manifest,
)
from cleave.manifests.resources import Device
from cleave.perf.hardware.gpu import GPU_PRODUCT

ARCHITECTURE = "kubernetes.io/arch"
DRIVER_MAJOR = "nvidia.com/cuda.driver-version.major"
OLD_DRIVER_MAJOR = "nvidia.com/cuda.driver.major"
"""Node labels of NVIDIA's feature discovery with the driver's version; it deprecates the second."""
MIN_DRIVER = 580
"""The first driver with CUDA 13, for which vLLM's wheels are built."""
_UNSUPPORTED_ARCHITECTURE = "arm64"

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def build_scheduling(pool: InstancePool, labels: dict[str, str], device: Device) -> Manifest:
    """Scheduling fields for the spec of a pod with `labels`."""
    template = pool.spec.template
    fields: Manifest = {}
    if selector := {**_build_gpu_selector(pool, device), **template.node_selector}:
        fields["nodeSelector"] = selector
    if template.tolerations:
        fields["tolerations"] = [
            toleration.model_dump(mode="json", exclude_none=True)
            for toleration in template.tolerations
        ]
    nodes = _build_node_affinity(pool, device)
    if affinity := {**_build_affinity(pool, labels), **({"nodeAffinity": nodes} if nodes else {})}:
        fields["affinity"] = affinity
    if SEGMENT not in labels and pool.spec.nodes == 1:
        fields["topologySpreadConstraints"] = topology.build_topology_spread({POOL: pool.name})
    return fields


def needs_own_image(engine: EngineSpec) -> bool:
    """Whether the engine runs in Cleave's image for GPUs, with its requirements of nodes."""
    return engine.type is EngineType.VLLM and engine.image is None


def explain_unusable(node_labels: Mapping[str, str]) -> str:
    """Why a GPU node cannot run Cleave's image for GPUs; empty: its labels name no reason."""
    if (machine := node_labels.get(ARCHITECTURE)) == _UNSUPPORTED_ARCHITECTURE:
        return f"is {machine}, and the image worker-cuda is for x86_64"
    driver = node_labels.get(DRIVER_MAJOR) or node_labels.get(OLD_DRIVER_MAJOR, "")
    if driver.isdigit() and int(driver) < MIN_DRIVER:
        return f"has driver {driver}, and CUDA 13 needs {MIN_DRIVER} or newer"
    return ""


def _build_node_affinity(pool: InstancePool, device: Device) -> Manifest:
    """Affinity to nodes that meet what Cleave's image requires, and what the template does.

    A node must meet one term, and all of its expressions, so each term of one side is joined with
    each of the other.
    """
    affinity: Manifest = pool.spec.template.affinity.node_affinity.model_dump(
        mode="json", exclude_defaults=True
    )
    if device == "gpu" and needs_own_image(pool.spec.engine):
        own = _build_driver_terms()
        terms = affinity.get(_REQUIRED, {}).get("nodeSelectorTerms", [{"matchExpressions": []}])
        joined = [
            {"matchExpressions": [*each, *term["matchExpressions"]]}
            for term in terms
            for each in own
        ]
        affinity[_REQUIRED] = {"nodeSelectorTerms": joined}
    return affinity


def _build_driver_terms() -> list[list[Manifest]]:
    """The same as `explain_unusable`, for the scheduler, which may not find any of these labels."""

    def require(key: str, operator: str, *values: str) -> Manifest:
        return {"key": key, "operator": operator, **({"values": [*values]} if values else {})}

    machine = require(ARCHITECTURE, "NotIn", _UNSUPPORTED_ARCHITECTURE)
    newer = str(MIN_DRIVER - 1)
    known, old_known = (require(label, "Gt", newer) for label in (DRIVER_MAJOR, OLD_DRIVER_MAJOR))
    absent, old_absent = (
        require(label, "DoesNotExist") for label in (DRIVER_MAJOR, OLD_DRIVER_MAJOR)
    )
    drivers = [[known], [absent, old_known], [absent, old_absent]]
    return [[machine, *each] for each in drivers]


def build_segment(pool: InstancePool, cell: int, rank: int) -> str:
    """Name of the group that must share a domain: the pods of a cell that hold the same stages.
    Each revision has its own cells: during a rollout they find no room beside the old ones."""
    spec = pool.spec
    domain = (spec.colocation or Colocation(per_cell=1)).topology_key
    # Within a clique all nodes of a cell share NVLink; otherwise every rank has its own node.
    stages = f"-{rank}" if spec.nodes > 1 and domain == topology.HOSTNAME else ""
    return f"{spec.revision}-{cell}{stages}"


def _build_affinity(pool: InstancePool, labels: dict[str, str]) -> Manifest:
    spec = pool.spec
    affinity = _build_cell_affinity(spec, labels) if SEGMENT in labels else {}
    if spec.nodes > 1:
        near = topology.build_instance_affinity({INSTANCE: labels[INSTANCE]})
    elif SEGMENT not in labels and spec.role is not Role.MIXED:
        near = topology.build_network_affinity({DEPLOYMENT: spec.deployment, COMPONENT: WORKER})
    else:
        return affinity
    return {**affinity, "podAffinity": {**affinity.get("podAffinity", {}), _PREFERRED: near}}


def _build_cell_affinity(spec: InstancePoolSpec, labels: dict[str, str]) -> Manifest:
    """Affinity to the pods of the cell; the first one takes a domain without other cells.

    The scheduler places pods one by one: two cells started in one domain could both lack room
    there. Cells of other revisions may share it, or a rollout would need twice the domains.
    """
    colocation = spec.colocation or Colocation(per_cell=1)
    own = {DEPLOYMENT: spec.deployment, SEGMENT: labels[SEGMENT]}
    other_cells = topology.build_anti_affinity_term(
        {**own, REVISION: spec.revision}, SEGMENT, colocation.topology_key
    )
    return {
        "podAffinity": {_REQUIRED: topology.build_required_affinity(own, colocation.topology_key)},
        "podAntiAffinity": (
            {_REQUIRED: [other_cells]}
            if colocation.exclusive
            else {_PREFERRED: [{"weight": 100, "podAffinityTerm": other_cells}]}
        ),
    }


def _build_gpu_selector(pool: InstancePool, device: Device) -> dict[str, str]:
    """The node label of the pool's kind of GPU, as NVIDIA's feature discovery writes it."""
    if pool.spec.gpu is None or device != "gpu":
        return {}
    return {GPU_PRODUCT: topology.get_product_label(pool.spec.gpu)}
