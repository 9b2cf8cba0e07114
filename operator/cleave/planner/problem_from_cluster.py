"""Builds the planner's `Problem` for engines on the machines of a cluster file.

Called by `cleave plan`, `cleave simulate` and `cleave up`. All faults of a deployment or a cluster
are reported here, with their path in the file, before anything is simulated.
"""

from collections.abc import Iterator
from pathlib import Path

from cleave.api.cluster import Cluster
from cleave.api.deployment import LLMDeployment, LLMDeploymentSpec
from cleave.api.engine import EngineSpec
from cleave.api.manifest import ManifestError
from cleave.api.planning import GpuChoice
from cleave.api.pods.worker_template import WorkerTemplate
from cleave.api.role import MAX_POD_ENGINES
from cleave.perf import estimator
from cleave.perf.estimate import Estimator
from cleave.perf.hardware import inventory
from cleave.perf.hardware.all_to_all import AllToAllBackend
from cleave.perf.hardware.expert_group import BALANCED, UNBALANCED, ExpertSettings
from cleave.perf.hardware.gpu import GPU_PRODUCT, Gpu, find_gpu
from cleave.perf.model.model_shape import ModelShape
from cleave.perf.speculation import SpeculatingEstimator
from cleave.planner import deployment_checks, left_out, memory_flags
from cleave.planner.deployment_shape import load_shape
from cleave.planner.placement import PlanError
from cleave.planner.problem import Problem, Supply, build_policies, limit_reuse
from cleave.planner.resolved_deployment import ResolvedDeployment, resolve
from cleave.planner.speculation import describe_speculation, find_speculation
from cleave.traffic import characterization, workload
from cleave.traffic.workload import Demand

_NO_ENCODERS = "--language-model-only"
_ALL_TO_ALL, _BALANCER = "--all2all-backend", "--enable-eplb"
"""vLLM's, of experts on several GPUs."""


def build_problem(
    deployment: LLMDeployment,
    cluster: Cluster,
    folder: Path = Path(),
    seed: int = 0,
    *,
    keeps_limit: bool = False,
) -> Problem:
    """The problem of planning `deployment` on `cluster`; relative paths start at `folder`.

    Where the spec has no maxModelLen, plans may set it, as far as the traffic's requests fit;
    `keeps_limit`: they may not. Raises PlanError or ManifestError.
    """
    resolved = resolve(deployment)
    spec = resolved.deployment.spec
    memory_flags.check_args(spec)
    shape = load_shape(deployment)
    if resolved.choice.fault:
        raise PlanError([resolved.choice.fault])
    kinds = _select_kinds(inventory.list_gpus(cluster, spec.planning.gpus), spec.template)
    longest = min(spec.model.max_model_len or shape.max_model_len, shape.max_model_len)
    traffic = build_demand(deployment, folder)
    return Problem(
        demand=traffic.with_max_model_len(longest),
        slo=spec.slo,
        supplies=build_supplies(
            cluster, kinds, spec.planning.gpus, has_cells=spec.can_share_gpu_memory
        ),
        shape=shape,
        estimator=_build_estimator(spec, shape, cluster, folder, traffic, keeps_limit=keeps_limit),
        planning=spec.planning,
        policies=build_policies(spec),
        seed=seed,
        notes=(
            *_describe_deployment(resolved, shape, cluster),
            *(f"{why}; not planned with" for why in inventory.list_unknown_gpus(cluster)),
            *inventory.list_unused_gpus(cluster),
            *characterization.list_remarks(traffic, longest),
            *(f"{gpu.name}: {gpu.limitation}" for gpu in kinds.values() if gpu.limitation),
        ),
    )


def _build_estimator(
    spec: LLMDeploymentSpec,
    shape: ModelShape,
    cluster: Cluster,
    folder: Path,
    traffic: Demand,
    *,
    keeps_limit: bool,
) -> Estimator:
    """The times of the deployment's engines. Raises PlanError."""
    longest = min(spec.model.max_model_len or shape.max_model_len, shape.max_model_len)
    is_fixed = keeps_limit or spec.model.max_model_len is not None
    mean_tokens = round(traffic.mean_prompt_tokens + traffic.mean_output_tokens)
    try:
        estimates = estimator.build_estimator(
            *(shape, cluster, spec.planning.gpus, folder, longest),
            reserve=memory_flags.build_shared_reserve(spec.engine),
            least_context=longest if is_fixed else min(longest, traffic.longest_request),
            context_tokens=min(longest, mean_tokens),
            experts=_read_expert_settings(spec.engine),
        )
    except ManifestError as error:
        raise PlanError(error.faults) from error
    speculation = find_speculation(spec, shape)
    return SpeculatingEstimator(estimates, speculation) if speculation else estimates


def _describe_deployment(
    resolved: ResolvedDeployment, shape: ModelShape, cluster: Cluster
) -> Iterator[str]:
    """What a plan assumes, leaves out and chooses for this deployment, a sentence each."""
    spec = resolved.deployment.spec
    sentences = [
        resolved.choice.describe(),
        deployment_checks.describe_gpu_parts(spec.template),
        _describe_unplanned(resolved),
        describe_speculation(spec),
        _describe_encoders(shape, spec.engine),
        _describe_all_to_all(spec.engine),
        inventory.describe_assumed_network(cluster),
        inventory.describe_assumed_all_reduces(cluster),
        inventory.describe_unseen_cells(cluster) if spec.can_share_gpu_memory else None,
        *memory_flags.describe(spec.engine),
        left_out.describe(spec),
    ]
    return filter(None, sentences)


def build_supplies(
    cluster: Cluster, kinds: dict[str, Gpu], choices: list[GpuChoice], *, has_cells: bool
) -> tuple[Supply, ...]:
    """The nodes whose GPU type may be used, with equal groups merged. Groups of a GPU type share
    its limit in their order. `has_cells`: cells may be pods."""
    groups: dict[tuple[str, int], int] = {}
    for group, gpu in inventory.list_groups(cluster):
        key = gpu.name, group.gpus_per_node
        groups[key] = groups.get(key, 0) + group.count
    own = [inventory.to_gpu(description) for description in cluster.gpus]
    remaining = {find_gpu(choice.type, own).name: choice.max for choice in choices}
    supplies = []
    for (name, per_node), count in groups.items():
        limit = remaining.get(name)
        total = count * per_node
        usable = total if limit is None else min(total, limit)
        if limit is not None:
            remaining[name] = limit - usable
        if name in kinds and usable:
            gpu = kinds[name]
            # CUDA IPC needs a shared PID namespace, so KV between pods of one node uses the
            # network, too. A cell is one pod.
            network = inventory.find_network_link(cluster, gpu)
            is_small = per_node <= MAX_POD_ENGINES
            within = inventory.find_cell_link(cluster, gpu) if has_cells and is_small else None
            supplies.append(Supply(name, count, per_node, usable, network, network, within))
    return tuple(supplies)


def _select_kinds(kinds: dict[str, Gpu], template: WorkerTemplate) -> dict[str, Gpu]:
    """The kinds of GPU that the template's node selector and affinity leave. Raises PlanError if
    none is."""
    label = template.node_selector.get(GPU_PRODUCT)
    left, field = kinds, "affinity"
    if label is not None:
        left = {name: gpu for name, gpu in kinds.items() if label in (name, *gpu.labels)}
        field = field if left else f"nodeSelector: {GPU_PRODUCT} {label!r}"
    affinity = template.affinity
    selected = {
        name: gpu
        for name, gpu in left.items()
        if affinity.may_select(GPU_PRODUCT, (name, *gpu.labels))
    }
    if not selected:
        there = ", ".join(gpu.product for gpu in (left or kinds).values())
        fault = (
            f"spec.template.{field} selects none of {there}, which the nodes have and "
            "spec.planning.gpus allows; change one of them"
        )
        raise PlanError([fault])
    return selected


def _describe_unplanned(resolved: ResolvedDeployment) -> str | None:
    """A sentence about a quantisation with which the plan does not count; None: there is none."""
    shape, value = resolved.shape, resolved.spec.engine.get_flag_value("--quantization")
    if shape is not None and value is not None and (why := shape.explain_unplanned(value)):
        return f"spec.engine.args: --quantization {why}"
    return None


def _read_expert_settings(engine: EngineSpec) -> ExpertSettings:
    """How the engines exchange tokens for experts, by their arguments."""
    value = engine.get_flag_value(_ALL_TO_ALL)
    known = {str(each): each for each in AllToAllBackend}
    backend = known.get(value or "", AllToAllBackend.ALL_GATHER)
    return ExpertSettings(backend, BALANCED if engine.has_flag(_BALANCER) else UNBALANCED)


def _describe_encoders(shape: ModelShape, engine: EngineSpec) -> str | None:
    """A sentence about weights that are not counted; None: there are none."""
    if not shape.has_encoders or engine.has_flag(_NO_ENCODERS):
        return None
    return (
        "the weights of the model's encoders (pictures, sound) are not counted until an engine has "
        f"reported the model: engines have less KV than planned; {_NO_ENCODERS} leaves them out"
    )


def _describe_all_to_all(engine: EngineSpec) -> str | None:
    """A sentence about a kernel whose times are not known; None: there is none."""
    value = engine.get_flag_value(_ALL_TO_ALL)
    if value is None or value in set(AllToAllBackend):
        return None
    return (
        f"spec.engine.args: {_ALL_TO_ALL} {value}: times are known of "
        f"{', '.join(AllToAllBackend)}; the plan counts with {AllToAllBackend.ALL_GATHER}"
    )


def build_demand(deployment: LLMDeployment, folder: Path) -> Demand:
    """The traffic of `deployment`; a relative trace path starts at `folder`. Raises PlanError."""
    workload_spec = deployment.spec.workload
    if workload_spec is None:
        fault = "spec.workload: required for planning; set rate, promptTokens and outputTokens"
        raise PlanError([fault])
    try:
        demand = workload.build_from_spec(workload_spec, folder)
    except workload.DemandError as error:
        raise PlanError([f"spec.workload: {error}"]) from error
    return limit_reuse(demand, deployment.spec.engine)
