"""The placement of a deployment that is not planned: how many instances each role has.

Pure; called by `cleave.local`, and by the command line to check a manifest. A placement is set in
spec.placement.manual, planned by `cleave.planner.plan_search` if traffic and machines are known, or
else the smallest disaggregated one. The reason says which.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cleave.api.deployment import LLMDeployment
from cleave.api.engine import EngineSpec, EngineType
from cleave.api.plan import RolePool
from cleave.api.role import Role
from cleave.perf import named_profiles
from cleave.perf.model import model_source
from cleave.planner.plan import PlannedKvLink, PlannedPool, PlanningResult
from cleave.planner.resolved_deployment import ResolvedDeployment


class PlanError(ValueError):
    """The deployment is well-formed but cannot be planned or placed."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = tuple(faults)
        """One line each: `path: fault`."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Instances per role, and the reason for them."""

    pools: tuple[PlannedPool, ...]
    """At most one per role, in the order prefill, decode, mixed."""
    reason: str
    """One sentence for status and the command line."""
    result: PlanningResult | None = None
    """The planner's result; None: set in spec.placement.manual, or not planned."""
    max_model_len: int | None = None
    """Longest request in tokens that the plan allows instead of the deployment; None: its own."""
    kv_link: PlannedKvLink | None = None
    """The link over which KV will go, of a placement that was not planned; None: not known."""

    @property
    def gpus(self) -> int:
        """GPUs (on CPU nodes: cores) of all instances."""
        return sum(pool.gpus for pool in self.pools)

    def count_replicas(self, role: Role) -> int:
        """Number of instances of `role`."""
        return sum(pool.replicas for pool in self.pools if pool.role is role)


def choose_placement(resolved: ResolvedDeployment) -> Placement:
    """The placement in spec.placement.manual, else one prefill and one decode instance.

    In a cluster a latency profile in a file is assumed to exist where the engines run. Raises
    PlanError.
    """
    engine, manual = resolved.spec.engine, resolved.spec.placement
    if not (resolved.is_in_cluster and named_profiles.is_profile_file(engine.emulation.latency)):
        _check_latency_profile(engine)
    if fault := model_source.find_config_fault(resolved.spec.model):
        raise PlanError([fault])
    if resolved.start_faults:
        raise PlanError(resolved.start_faults)
    if resolved.choice.fault:
        raise PlanError([resolved.choice.fault])
    if manual is None:
        smallest = PlannedPool(Role.PREFILL, 1), PlannedPool(Role.DECODE, 1)
        return Placement(smallest, _explain_default(resolved))
    if resolved.parallelism_faults:
        raise PlanError(resolved.parallelism_faults)
    pools = sorted(manual.manual, key=lambda pool: list(Role).index(pool.role))
    return Placement(tuple(map(to_planned_pool, pools)), reason="set in spec.placement.manual")


def to_planned_pool(pool: RolePool) -> PlannedPool:
    """Convert a pool of a manifest or a status to the planner's type."""
    return PlannedPool(
        pool.role,
        pool.replicas,
        pool.parallelism,
        gpu=pool.gpu,
        max_num_seqs=pool.max_num_seqs,
        max_num_batched_tokens=pool.max_num_batched_tokens,
        per_cell=pool.per_cell,
    )


def resolve_paths(deployment: LLMDeployment, folder: Path) -> LLMDeployment:
    """The deployment with the path of its latency profile made absolute, relative to `folder`.
    Engines run in other working directories; a relative path is meant relative to the manifest."""
    engine = deployment.spec.engine
    if engine.emulated is None or not named_profiles.is_profile_file(engine.emulated.latency):
        return deployment
    path = str(folder.absolute() / engine.emulated.latency)
    emulated = engine.emulated.model_copy(update={"latency": path})
    engine = engine.model_copy(update={"emulated": emulated})
    spec = deployment.spec.model_copy(update={"engine": engine})
    return deployment.model_copy(update={"spec": spec})


def _explain_default(resolved: ResolvedDeployment) -> str:
    """Why nothing was planned and the default placement is used."""
    default = "default placement (1 prefill + 1 decode)"
    if resolved.spec.workload is None:
        return f"{default}: no spec.workload to plan from and no spec.placement.manual"
    if resolved.unknown_model is None:
        return f"{default}: no cluster file with the machines and no spec.placement.manual"
    until = " until the first engine has reported the model" if resolved.is_in_cluster else ""
    return (
        f"{default}, one GPU each: nothing is planned{until}, as the planner does not know the "
        f"model {resolved.spec.model.source} ({resolved.unknown_model}); whether its weights fit "
        f"one GPU is not known either. To plan it now, {model_source.REMEDY}; or set instances in "
        "spec.placement.manual"
    )


def _check_latency_profile(engine: EngineSpec) -> None:
    """Raise PlanError for an unknown latency profile, before an engine fails to start with it."""
    if engine.type is not EngineType.EMULATED:
        return
    try:
        named_profiles.check_profile(engine.emulation.latency)
    except named_profiles.UnknownProfileError as error:
        raise PlanError([f"spec.engine.emulated.latency: {error}"]) from error
