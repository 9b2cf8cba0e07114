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

_VLLM_PROCESSES = 2
"""vLLM's API server and engine core; each GPU's worker process also wants a core."""


def resources(spec: InstancePoolSpec, device: Device) -> Manifest:
    """The container's `resources`: defaults for engine and device, then the pool's overrides."""
    return _merged(_defaults(spec, device), spec.template.resources)


def _defaults(spec: InstancePoolSpec, device: Device) -> Resources:
    size = spec.parallelism.gpus
    if spec.engine.type is EngineType.EMULATED:
        return Resources(requests={"cpu": "20m", "memory": "128Mi"}, limits={"memory": "512Mi"})
    if device == "cpu":
        return Resources(limits={"cpu": str(size), "memory": f"{6 * size}Gi"})
    return Resources(
        requests={"cpu": str(_VLLM_PROCESSES + size), "memory": "16Gi"}, limits={GPU: str(size)}
    )


def _merged(defaults: Resources, overrides: Resources) -> Manifest:
    named = overrides.requests.keys() | overrides.limits.keys()
    limits = {k: v for k, v in defaults.limits.items() if k not in named} | overrides.limits
    requests = {k: v for k, v in defaults.requests.items() if k not in named} | overrides.requests
    # As the API server does: a limit without a request is the request too.
    return {"requests": limits | requests, "limits": limits}
