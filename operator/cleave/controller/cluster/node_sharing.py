"""What keeps a node's GPUs from a deployment: parts, other kinds, taints, the template. Pure.

Called for the inventory of a plan. Such nodes belong to other work, or to manual placements.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from cleave.api.pods.quantity import parse_quantity
from cleave.api.pods.worker_template import Toleration, WorkerTemplate
from cleave.manifests.labels import GPU, Manifest
from cleave.perf.hardware.gpu import GPU_PRODUCT

_NO_PARTS = "all-disabled"
"""The MIG configuration of NVIDIA's operator in which all GPUs are whole."""
_MIG_CONFIG, _PARTITION = "nvidia.com/mig.config", "cloud.google.com/gke-gpu-partition-size"
_REPLICAS, _COUNT = "nvidia.com/gpu.replicas", "nvidia.com/gpu.count"
_SHARING = "nvidia.com/gpu.sharing-strategy", "cloud.google.com/gke-gpu-sharing-strategy"
_ACCELERATOR = re.compile(
    r"(^|[./-])([sv]?gpu|v?cuda|v?mlu|mig-|tpu|npu|gaudi|neuron|ascend|i915|xe$|dcu|gcu|xpu|qaic)",
    re.IGNORECASE,
)
"""In names of resources: other makers' devices, and parts of NVIDIA's."""
_GKE_POOL = "cloud.google.com/gke-nodepool"
_GPU_TAINT = "nvidia.com/gpu"
_HEALTH = "node.kubernetes.io/"
"""Prefix of the taints with which Kubernetes marks nodes for a while: not ready, cordoned, short of
memory."""


class Taint(NamedTuple):
    """A taint of a node."""

    key: str
    value: str
    effect: str

    def __str__(self) -> str:
        return (
            f"{self.key}={self.value}:{self.effect}" if self.value else f"{self.key}:{self.effect}"
        )


def explain_shared(labels: Mapping[str, str], num_gpus: int) -> str:
    """Why the GPUs of a node with these labels are not whole ones; empty: they are."""
    parts = labels.get(_MIG_CONFIG, _NO_PARTS)
    if parts != _NO_PARTS or (parts := labels.get(_PARTITION, "")):
        return f"divides its GPUs into parts (MIG: {parts})"
    strategy = next((labels[name] for name in _SHARING if labels.get(name, "none") != "none"), "")
    replicas, count = (labels.get(name, "") for name in (_REPLICAS, _COUNT))
    if strategy or (replicas.isdecimal() and int(replicas) > 1):
        return f"shares its GPUs between pods ({strategy or f'{replicas} for each GPU'})"
    if count.isdecimal() and 0 < int(count) < num_gpus:
        return f"shares its GPUs between pods ({num_gpus} for {count} GPUs)"
    return ""


def explain_uncounted(labels: Mapping[str, str], allocatable: Mapping[str, str]) -> str:
    """Why a node that offers these resources, and not `nvidia.com/gpu`, does not count although it
    has accelerators; empty: it has none."""
    others = filter(_ACCELERATOR.search, sorted(allocatable))
    if other := next((name for name in others if parse_quantity(allocatable[name])), ""):
        return f"offers {other}, and plans count {GPU}; placement.manual can use it"
    product = labels.get(GPU_PRODUCT, "")
    return f"has {product} by its label, and offers no {GPU} now" if product else ""


def list_taints(node: Manifest) -> tuple[Taint, ...]:
    """The taints that keep pods from a node. GKE gives pods that request GPUs the toleration of its
    taint on GPU nodes."""
    is_gke = _GKE_POOL in node["metadata"].get("labels", {})
    taints = (
        Taint(each.get("key", ""), each.get("value", ""), each.get("effect", ""))
        for each in node.get("spec", {}).get("taints") or ()
    )
    return tuple(
        each
        for each in taints
        if each.effect in {"NoSchedule", "NoExecute"}
        and not each.key.startswith(_HEALTH)
        and not (is_gke and each.key == _GPU_TAINT)
    )


def explain_unreachable(
    labels: frozenset[tuple[str, str]], taints: tuple[Taint, ...], template: WorkerTemplate
) -> str:
    """Why the scheduler puts no pod of the template on a node; empty: it may."""
    if lacking := sorted(template.node_selector.items() - labels):
        pairs = ", ".join(f"{key}={value}" for key, value in lacking)
        return f"lacks labels of template.nodeSelector ({pairs})"
    if not template.affinity.is_met(dict(labels)):
        return "is not of those that template.affinity requires"
    taints_left = ", ".join(_list_open_taints(taints, template.tolerations))
    return f"has taints that template.tolerations lacks ({taints_left})" if taints_left else ""


def _list_open_taints(taints: tuple[Taint, ...], tolerations: list[Toleration]) -> Iterator[str]:
    for taint in taints:
        if not any(_is_tolerated(taint, each) for each in tolerations):
            yield str(taint)


def _is_tolerated(taint: Taint, toleration: Toleration) -> bool:
    """As Kubernetes decides it."""
    if toleration.effect not in (None, taint.effect) or toleration.key not in (None, "", taint.key):
        return False
    return toleration.operator == "Exists" or (toleration.value or "") == taint.value
