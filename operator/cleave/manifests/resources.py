"""CPU, memory and devices of a worker container. Pure; called by the worker's pod builder.

Kubernetes gives a container exclusive cores (static CPU manager policy) only when its CPU request
is a whole number and equal to its limit, so defaults and overrides are merged per resource.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from cleave.api.engine import EngineType, Resources
from cleave.api.pool import InstancePoolSpec
from cleave.manifests.labels import Manifest
from cleave.manifests.quantity import format_quantity, parse_quantity

Device = Literal["gpu", "cpu"]
"""What the nodes compute on."""

GPU = "nvidia.com/gpu"
GPU_PRODUCT = "nvidia.com/gpu.product"
_SHARED_RDMA = "rdma/"
"""Prefix of k8s-rdma-shared-dev-plugin's resources: each unit opens the same cards."""
_HOST_DEVICE = "nvidia.com/hostdev"
"""Whole cards, one per unit, as NVIDIA's Network Operator names them."""

_VLLM_PROCESSES = 2
"""vLLM's API server and engine core; each GPU's worker process needs a core as well."""
_BASE_GIB = 8
_GIB_PER_GPU = 8
"""Host memory for vLLM's processes, pinned buffers and shared memory, through which weights are
loaded."""


def build_resources(spec: InstancePoolSpec, device: Device) -> Manifest:
    """The container's `resources`: defaults for engine and device, with the pool's overrides."""
    return _merge(_build_defaults(spec, device), spec.template.resources)


def has_rdma(requested: Resources) -> bool:
    """Whether an RDMA device (`rdma/ib`, ...) is named."""
    return any(map(is_rdma_device, (*requested.limits, *requested.requests)))


def find_rdma_device(allocatable: Mapping[str, str], num_gpus: int) -> str:
    """The first RDMA device of a node by name; empty: none that suffices for all its GPUs.

    Pods that require one could otherwise not use all GPUs. AWS's `vpc.amazonaws.com/efa` is not
    among them: the UCX of NIXL's wheel does not drive those cards.
    """
    devices = sorted(filter(is_rdma_device, allocatable))
    least = max(1, num_gpus)
    return next((name for name in devices if parse_quantity(allocatable[name]) >= least), "")


def add_rdma_device(spec: InstancePoolSpec, name: str) -> InstancePoolSpec:
    """The spec of a pool on GPUs whose pods also request this RDMA device of their nodes.

    A device that the template names takes precedence; with the quantity 0 there is none.
    """
    named = spec.template.resources
    if not name or spec.engine.type is EngineType.EMULATED or has_rdma(named):
        return spec
    units = 1 if name.startswith(_SHARED_RDMA) else spec.gpus // spec.nodes
    more = named.model_copy(update={"limits": {**named.limits, name: str(units)}})
    return spec.model_copy(
        update={"template": spec.template.model_copy(update={"resources": more})}
    )


def is_rdma_device(name: str) -> bool:
    """Whether a resource is a network card for RDMA."""
    return name.startswith(_SHARED_RDMA) or name == _HOST_DEVICE


def sum_resources(parts: Sequence[Manifest]) -> Manifest:
    """The resources of a container that does the work of several; RDMA devices are shared."""
    kinds = dict.fromkeys(kind for part in parts for kind in part)
    return {kind: _sum_amounts([part.get(kind, {}) for part in parts]) for kind in kinds}


def _sum_amounts(parts: Sequence[Manifest]) -> Manifest:
    names = dict.fromkeys(name for part in parts for name in part)
    amounts = {name: [parse_quantity(part.get(name, 0)) for part in parts] for name in names}
    return {
        name: format_quantity(max(each) if is_rdma_device(name) else sum(each))
        for name, each in amounts.items()
    }


def _build_defaults(spec: InstancePoolSpec, device: Device) -> Resources:
    size = spec.parallelism.gpus
    if spec.engine.type is EngineType.EMULATED:
        return Resources(requests={"cpu": "20m", "memory": "128Mi"}, limits={"memory": "512Mi"})
    if device == "cpu":
        return Resources(limits={"cpu": str(size), "memory": f"{6 * size}Gi"})
    gpus_per_node = size // spec.nodes
    return Resources(
        limits={
            GPU: str(gpus_per_node),
            "cpu": str(_VLLM_PROCESSES + gpus_per_node),
            "memory": f"{_BASE_GIB + _GIB_PER_GPU * gpus_per_node}Gi",
        }
    )


def _merge(defaults: Resources, overrides: Resources) -> Manifest:
    named = overrides.requests.keys() | overrides.limits.keys()
    limits = {k: v for k, v in defaults.limits.items() if k not in named} | overrides.limits
    requests = {k: v for k, v in defaults.requests.items() if k not in named} | overrides.requests
    # As in the API server, a limit without a request is also the request.
    return {"requests": limits | requests, "limits": limits}
