"""CPU, memory and devices of a worker container. Pure; called by the worker's pod builder.

Kubernetes gives a container exclusive cores (static CPU manager policy) only when its CPU request
is a whole number and equal to its limit, so defaults and overrides are merged per resource.
"""

from typing import Literal

from cleave.api.engine import EngineType, Resources
from cleave.api.pool import InstancePoolSpec
from cleave.manifests.labels import Manifest

Device = Literal["gpu", "cpu"]
"""What the nodes compute on."""

GPU = "nvidia.com/gpu"
GPU_PRODUCT = "nvidia.com/gpu.product"
_RDMA = "rdma/"

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
    """Whether an RDMA device (`rdma/ib`, ...) is requested."""
    return any(name.startswith(_RDMA) for name in (*requested.limits, *requested.requests))


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
