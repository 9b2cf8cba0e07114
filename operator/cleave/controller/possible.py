"""What a resource asks for that no cluster could give, and what this cluster cannot give today.

Pure. Called by `cleave.controller.admission` and the planner's desk. What is hard: a fault is for
ever, so it must hold whatever nodes come later; what depends on the nodes is a warning.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cleave.api.cluster import Cluster
from cleave.api.deployment import LLMDeployment
from cleave.api.engine import Engine, EngineType
from cleave.api.manifest import ManifestError
from cleave.api.model import Model
from cleave.api.planned import ManualPool
from cleave.api.pool import InstancePool
from cleave.api.role import Parallelism
from cleave.perf import latency, model
from cleave.perf.gpu import UnknownGpuError, find
from cleave.perf.model import ModelShape
from cleave.planner import asking, checks
from cleave.planner.candidates import sizes
from cleave.planner.placement import PlanError
from cleave.planner.problem import Problem


@dataclass(frozen=True, slots=True)
class Findings:
    """One line each: `path: what is wrong`."""

    faults: tuple[str, ...] = ()
    """No change of the cluster mends them."""
    warnings: tuple[str, ...] = ()
    """Other nodes would."""


def of_deployment(deployment: LLMDeployment, cluster: Cluster | None) -> Findings:
    """Of a whole deployment. `cluster`: the nodes there are; None: not known."""
    spec = deployment.spec
    faults = [*_profile_faults(spec.engine), *unread(deployment)]
    warnings = tuple(checks.doubts(deployment, reads_files=False))
    if spec.engine.type is EngineType.EMULATED:
        # Its instances have no weights to split and run on any node.
        return Findings(tuple(faults), warnings)
    faults += checks.split_faults(deployment, reads_files=False)
    if spec.placement is not None:
        warnings += tuple(_missing_machines(spec.placement.manual, cluster))
    elif spec.workload is not None and cluster is not None and not faults:
        warnings += tuple(_unplannable(deployment, cluster))
    return Findings(tuple(faults), warnings)


def of_pool(pool: InstancePool, cluster: Cluster | None) -> Findings:
    """Of one pool that was made by hand."""
    spec = pool.spec
    faults = [*_profile_faults(spec.engine)]
    if spec.engine.type is EngineType.EMULATED:
        return Findings(tuple(faults))
    shape = _shape(spec.model)
    if shape and (reason := shape.why_not(spec.parallelism.tensor, spec.parallelism.pipeline)):
        faults.append(f"spec.parallelism: {shape.name}: {reason}")
    missing = _missing_machine("spec", spec.gpu, spec.parallelism, cluster)
    return Findings(tuple(faults), tuple(missing))


def unread(deployment: LLMDeployment) -> Iterator[str]:
    """Files that a plan would need. The operator opens none that a deployment names.

    Its own files, its token among them, are not for the eyes of whoever may write a deployment, and
    what is wrong with a file is told with its text.
    """
    spec = deployment.spec
    if spec.placement is not None or spec.workload is None:
        return
    remedy = "state instances by hand in spec.placement.manual"
    if spec.workload.trace is not None:
        yield (
            "spec.workload.trace.path: no file is read in a cluster; state rate, promptTokens and "
            f"outputTokens, as `cleave workload` tells them, or {remedy}"
        )
    if spec.engine.type is EngineType.EMULATED and latency.is_file(spec.engine.emulation.latency):
        yield f"spec.engine.emulated.latency: no file is read in a cluster; {remedy}"


def _profile_faults(engine: Engine) -> Iterator[str]:
    """A file may be in the workers' image and not here."""
    if engine.type is not EngineType.EMULATED or latency.is_file(engine.emulation.latency):
        return
    try:
        latency.load(engine.emulation.latency)
    except latency.UnknownProfileError as error:
        yield f"spec.engine.emulated.latency: {error}"


def _missing_machines(pools: Sequence[ManualPool], cluster: Cluster | None) -> Iterator[str]:
    for index, pool in enumerate(pools):
        path = f"spec.placement.manual[{index}]"
        yield from _missing_machine(path, pool.gpu, pool.parallelism, cluster)


def _missing_machine(
    path: str, gpu: str | None, parallelism: Parallelism, cluster: Cluster | None
) -> Iterator[str]:
    """An instance may be spread over nodes, of one kind of GPU."""
    if cluster is None:
        return
    there: Counter[str] = Counter()
    for group in cluster.nodes:
        there[_kind(group.gpu)] += group.count * group.gpus_per_node
    if gpu is not None and _kind(gpu) not in there:
        yield f"{path}.gpu: no node has {gpu} now, there is {', '.join(there)}; instances will wait"
        return
    kind = there.most_common(1)[0][0] if gpu is None else _kind(gpu)
    if parallelism.gpus > there[kind]:
        yield (
            f"{path}.parallelism: an instance takes {parallelism.gpus} GPUs, all nodes together "
            f"have {there[kind]} x {kind} now; instances will wait"
        )


def _unplannable(deployment: LLMDeployment, cluster: Cluster) -> Iterator[str]:
    """Why nothing can be planned on these nodes; of an unknown model that is said already."""
    if checks.unknown_model(deployment, reads_files=False) is not None:
        return
    try:
        problem = asking.problem(deployment, cluster)
    except (PlanError, ManifestError) as error:
        yield from error.faults
        return
    if not any(_fits(problem)):
        reasons = {
            supply.gpu: problem.estimator.why_not(supply.gpu, supply.gpus_per_node, 1)
            or "spec.planning leaves it too few GPUs"
            for supply in problem.supplies
        }
        told = "; ".join(f"{gpu}: {reason}" for gpu, reason in reasons.items())
        yield f"spec.model.source: no instance fits the nodes there are now ({told})"


def _fits(problem: Problem) -> Iterator[bool]:
    for supply in problem.supplies:
        for tensor, pipeline in sizes(problem, supply):
            yield problem.estimator.why_not(supply.gpu, tensor, pipeline) is None


def _shape(asked: Model) -> ModelShape | None:
    """None: its dimensions are not known here, which is no fault of the pool."""
    if asked.folder is not None:
        return None
    try:
        return model.load(asked.locator)
    except model.UnknownModelError:
        return None


def _kind(gpu: str) -> str:
    try:
        return find(gpu).name
    except UnknownGpuError:
        return gpu
