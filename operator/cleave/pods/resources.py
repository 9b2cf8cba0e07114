"""Cores, memory and devices of a worker container. Pure; called by the worker's pod builder.

What is hard: Kubernetes gives a container cores of its own (static CPU manager) only when its CPU
request is a whole number and equal to its limit, so defaults and overrides are merged per resource.
"""

from typing import Literal

from cleave.api.engine import EngineType, Resources
from cleave.api.pool import InstancePoolSpec
from cleave.pods.labels import Manifest

Device = Literal["gpu", "cpu"]
"""What computes tokens on the nodes."""

GPU = "nvidia.com/gpu"
GPU_PRODUCT = "nvidia.com/gpu.product"
_RDMA = "rdma/"

_VLLM_PROCESSES = 2
"""vLLM's API server and engine core; each GPU's worker process also wants a core."""
_BASE_GIB = 8
_GIB_PER_GPU = 8
"""Of host memory, for vLLM's processes, pinned buffers and shared memory; weights pass through."""


def resources(spec: InstancePoolSpec, device: Device) -> Manifest:
    """The container's `resources`: defaults for engine and device, then the pool's overrides."""
    return _merged(_defaults(spec, device), spec.template.resources)


def has_rdma(asked: Resources) -> bool:
    """Whether a device is asked for that reads and writes memory by itself (`rdma/ib`, ...)."""
    return any(name.startswith(_RDMA) for name in (*asked.limits, *asked.requests))


def _defaults(spec: InstancePoolSpec, device: Device) -> Resources:
    size = spec.parallelism.gpus
    if spec.engine.type is EngineType.EMULATED:
        return Resources(requests={"cpu": "20m", "memory": "128Mi"}, limits={"memory": "512Mi"})
    if device == "cpu":
        return Resources(limits={"cpu": str(size), "memory": f"{6 * size}Gi"})
    here = size // spec.nodes
    return Resources(
        limits={
            GPU: str(here),
            "cpu": str(_VLLM_PROCESSES + here),
            "memory": f"{_BASE_GIB + _GIB_PER_GPU * here}Gi",
        }
    )


def _merged(defaults: Resources, overrides: Resources) -> Manifest:
    named = overrides.requests.keys() | overrides.limits.keys()
    limits = {k: v for k, v in defaults.limits.items() if k not in named} | overrides.limits
    requests = {k: v for k, v in defaults.requests.items() if k not in named} | overrides.requests
    # As the API server does: a limit without a request is the request too.
    return {"requests": limits | requests, "limits": limits}
