"""Checks a resource for requests that no cluster, or not this cluster now, can satisfy.

Pure. Called by `cleave.controller.webhook.admission` and by the planner's process. A fault is
final, so it must hold for any nodes that are added later; findings that depend on the nodes are
warnings.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cleave.api.cluster import Cluster
from cleave.api.deployment import LLMDeployment
from cleave.api.engine import EngineSpec, EngineType
from cleave.api.manifest import ManifestError
from cleave.api.model import ModelSpec
from cleave.api.plan import ManualPool
from cleave.api.pool import InstancePool
from cleave.api.role import Parallelism
from cleave.perf import named_profiles
from cleave.perf.hardware.gpu import UnknownGpuError, find_gpu
from cleave.perf.model import model_source
from cleave.perf.model.model_shape import ModelShape, UnknownModelError
from cleave.planner import (
    argument_checks,
    deployment_checks,
    problem_from_cluster,
    template_checks,
)
from cleave.planner.placement import PlanError
from cleave.planner.problem import Problem
from cleave.planner.resolved_deployment import resolve_in_cluster
from cleave.planner.search.candidates import explain_unsupported, list_sizes


@dataclass(frozen=True, slots=True)
class ValidationFindings:
    """Faults and warnings, one line each: `path: what is wrong`."""

    faults: tuple[str, ...] = ()
    """No change of the cluster can repair them."""
    warnings: tuple[str, ...] = ()
    """Other nodes would resolve them."""


def check_deployment(deployment: LLMDeployment, cluster: Cluster | None) -> ValidationFindings:
    """Check an LLMDeployment. `cluster`: the present nodes; None: not known."""
    spec = deployment.spec
    faults = [*_list_profile_faults(spec.engine), *list_unreadable_files(deployment)]
    if fault := model_source.find_config_fault(spec.model):
        return ValidationFindings((*faults, fault))
    resolved = resolve_in_cluster(deployment)
    faults += resolved.start_faults
    warnings = resolved.warnings
    if spec.engine.type is EngineType.EMULATED:
        # Emulated instances have no weights to split and run on any node.
        return ValidationFindings(tuple(faults), warnings)
    faults += [resolved.choice.fault] if resolved.choice.fault else []
    faults += resolved.parallelism_faults
    if spec.placement is not None:
        warnings += tuple(_list_missing_pool_gpus(spec.placement.manual, cluster))
    elif (
        spec.workload is not None and cluster is not None and not (faults or resolved.unknown_model)
    ):
        warnings += tuple(_list_plan_faults(deployment, cluster))
    return ValidationFindings(tuple(faults), warnings)


def check_pool(pool: InstancePool, cluster: Cluster | None) -> ValidationFindings:
    """Check a manually created pool. `cluster`: the present nodes; None: not known."""
    spec = pool.spec
    faults = [
        *_list_profile_faults(spec.engine),
        *template_checks.list_template_faults(spec.template),
        *argument_checks.list_argument_faults(spec.engine),
    ]
    if fault := model_source.find_config_fault(spec.model):
        return ValidationFindings((*faults, fault))
    warnings = (
        *deployment_checks.list_gpu_overrides(spec.template),
        *argument_checks.list_argument_warnings(spec.engine),
    )
    if spec.engine.type is EngineType.EMULATED:
        return ValidationFindings(tuple(faults), warnings)
    shape = _load_model_shape(spec.model)
    size = spec.parallelism
    reason = shape and shape.explain_unsupported(
        size.tensor, size.pipeline, size.data, expert=size.expert
    )
    if shape and reason:
        faults.append(f"spec.parallelism: {shape.name}: {reason}")
    missing = _list_missing_gpus("spec", spec.gpu, spec.parallelism, cluster)
    return ValidationFindings(tuple(faults), (*warnings, *missing))


def list_unreadable_files(deployment: LLMDeployment) -> Iterator[str]:
    """Yield a fault for each file that a plan would need: the operator reads no user files.

    Its own files, such as its token, must not be readable for users who may create a deployment,
    and the fault of a file quotes its text.
    """
    spec = deployment.spec
    if spec.placement is not None or spec.workload is None:
        return
    remedy = "list the instances in spec.placement.manual"
    if spec.workload.trace is not None:
        yield (
            "spec.workload.trace.path: no file is read in a cluster; state rate, promptTokens and "
            f"outputTokens, as `cleave workload` prints them, or {remedy}"
        )
    is_emulated, latency = spec.engine.type is EngineType.EMULATED, spec.engine.emulation.latency
    if is_emulated and named_profiles.is_profile_file(latency):
        yield f"spec.engine.emulated.latency: no file is read in a cluster; {remedy}"


def _list_profile_faults(engine: EngineSpec) -> Iterator[str]:
    """Check a profile by name; a file may exist in the workers' image only."""
    latency = engine.emulation.latency
    if engine.type is not EngineType.EMULATED or named_profiles.is_profile_file(latency):
        return
    try:
        named_profiles.load_profile(latency)
    except named_profiles.UnknownProfileError as error:
        yield f"spec.engine.emulated.latency: {error}"


def _list_missing_pool_gpus(pools: Sequence[ManualPool], cluster: Cluster | None) -> Iterator[str]:
    for index, pool in enumerate(pools):
        path = f"spec.placement.manual[{index}]"
        yield from _list_missing_gpus(path, pool.gpu, pool.parallelism, cluster)


def _list_missing_gpus(
    path: str, gpu: str | None, parallelism: Parallelism, cluster: Cluster | None
) -> Iterator[str]:
    """Check that the nodes have the GPUs of one instance, which may span several nodes."""
    if cluster is None:
        return
    gpus_by_kind: Counter[str] = Counter()
    largest: Counter[str] = Counter()
    for group in cluster.nodes:
        name = _normalize_gpu(group.gpu)
        gpus_by_kind[name] += group.count * group.gpus_per_node
        largest[name] = max(largest[name], group.gpus_per_node)
    if gpu is not None and _normalize_gpu(gpu) not in gpus_by_kind:
        kinds = ", ".join(gpus_by_kind)
        yield (
            f"{path}.gpu: no node has {gpu} now, there is {kinds}; instances will wait, "
            "unless plans leave out nodes with this label"
        )
        return
    kind = gpus_by_kind.most_common(1)[0][0] if gpu is None else _normalize_gpu(gpu)
    if parallelism.gpus > gpus_by_kind[kind]:
        yield (
            f"{path}.parallelism: an instance takes {parallelism.gpus} GPUs, all nodes together "
            f"have {gpus_by_kind[kind]} x {kind} now; instances will wait"
        )
    elif parallelism.data > 1 and parallelism.gpus_per_engine > largest[kind]:
        yield (
            f"{path}.parallelism: a data-parallel rank takes {parallelism.gpus_per_engine} GPUs of "
            f"one node, the largest node has {largest[kind]} x {kind} now; instances will wait: "
            "use a smaller tensor or pipeline size"
        )


def _list_plan_faults(deployment: LLMDeployment, cluster: Cluster) -> Iterator[str]:
    """Why no plan is possible on these nodes, of a known model."""
    try:
        problem = problem_from_cluster.build_problem(deployment, cluster)
    except (PlanError, ManifestError) as error:
        yield from error.faults
        return
    if not any(_list_fits(problem)):
        reasons = {
            supply.gpu: problem.estimator.explain_unsupported(supply.gpu, supply.gpus_per_node, 1)
            or "spec.planning leaves it too few GPUs"
            for supply in problem.supplies
        }
        details = "; ".join(f"{gpu}: {reason}" for gpu, reason in reasons.items())
        yield f"spec.model.source: no instance fits the nodes there are now ({details})"


def _list_fits(problem: Problem) -> Iterator[bool]:
    for supply in problem.supplies:
        for size in list_sizes(problem, supply):
            yield explain_unsupported(problem, supply.gpu, size) is None


def _load_model_shape(spec: ModelSpec) -> ModelShape | None:
    """Load the model's dimensions; None: they are not known here, which is not a fault."""
    try:
        return model_source.load_known_shape(spec)
    except UnknownModelError:
        return None


def _normalize_gpu(gpu: str) -> str:
    try:
        return find_gpu(gpu).name
    except UnknownGpuError:
        return gpu
