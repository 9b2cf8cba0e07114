"""What a plan depends on: the spec, observed traffic and the latency model's correction. Pure.

The last two are kept in the status, so that a restarted operator neither loses them nor measures
them again. Each records the hash of what it was measured for, and is valid as long as the spec
yields the same.
"""

from pydantic import ValidationError

from cleave.api.deployment import LLMDeployment
from cleave.api.engine import EngineType
from cleave.api.plan import SelectedPlan
from cleave.api.replan_status import FittedPlanInputs, LatencyCorrection
from cleave.api.workload import Workload
from cleave.controller.cluster.apply import hash_content
from cleave.controller.cluster.inventory import Inventory
from cleave.manifests.labels import Manifest
from cleave.perf.latency_correction import NO_CORRECTION, Correction
from cleave.planner.placement import Placement, to_planned_pool


def read_fitted_inputs(
    deployment: LLMDeployment, status: Manifest, inventory: Inventory
) -> FittedPlanInputs | None:
    """Return what replaces the spec's inputs; None: the plan is made from the spec."""
    fitted = _read_inputs(deployment, status)
    if fitted and fitted.correction and fitted.correction.of != hash_model(deployment, inventory):
        return fitted.model_copy(update={"correction": None})
    return fitted


def get_planned_workload(deployment: LLMDeployment, status: Manifest) -> Workload | None:
    """Return the traffic that the plan was made for; None: no traffic was given or observed."""
    fitted = _read_inputs(deployment, status)
    return fitted.workload if fitted else deployment.spec.workload


def _read_inputs(deployment: LLMDeployment, status: Manifest) -> FittedPlanInputs | None:
    try:
        fitted = FittedPlanInputs.model_validate(status.get("basis"), by_alias=True)
    except ValidationError:
        return None
    return fitted if fitted.of == hash_workload(deployment) else None


def read_correction(
    deployment: LLMDeployment, status: Manifest, inventory: Inventory
) -> LatencyCorrection | None:
    """Return the correction of the latency model; None: there is none for this model."""
    try:
        correction = LatencyCorrection.model_validate(status.get("correction"), by_alias=True)
    except ValidationError:
        return None
    return correction if correction.of == hash_model(deployment, inventory) else None


def hash_workload(deployment: LLMDeployment) -> str:
    """Hash the traffic of the spec."""
    workload = deployment.spec.workload
    return hash_content(
        workload.model_dump(mode="json", exclude_defaults=True) if workload else None
    )


def hash_model(deployment: LLMDeployment, inventory: Inventory) -> str:
    """Hash what latencies depend on: model, engine and kinds of nodes."""
    spec = deployment.spec
    parts = spec.model_dump(
        mode="json",
        exclude_defaults=True,
        include={"model", "engine"},
        exclude={"model": {"cache"}},
    )
    kinds = inventory.node_kinds_hash if spec.engine.type is EngineType.VLLM else ""
    return hash_content([parts, kinds])


def hash_inputs(
    deployment: LLMDeployment, inventory: Inventory, fitted_inputs: FittedPlanInputs | None = None
) -> str:
    """Hash everything that a plan depends on; the engine's env and image change no plan."""
    spec = deployment.spec
    parts = spec.model_dump(
        mode="json",
        exclude_defaults=True,
        include={"model", "slo", "workload", "planning", "engine"},
        exclude={"engine": {"env", "image"}, "planning": {"mode", "replan"}, "model": {"cache"}},
    )
    # Emulated engines run on any node.
    kinds = inventory.node_kinds_hash if spec.engine.type is EngineType.VLLM else ""
    base = [{name: part for name, part in parts.items() if part}, kinds]
    if spec.scaling.roles:
        # Then the plan needs a scaling law as well.
        base.append("growth")
    return hash_content([*base, fitted_inputs.model_dump(mode="json")] if fitted_inputs else base)


def read_placement(written: Manifest) -> Placement:
    """Read the placement from `status.plan`. Raises ValueError when it is not readable."""
    selected = SelectedPlan.model_validate(written, by_alias=True)
    return Placement(tuple(map(to_planned_pool, selected.pools)), selected.reason)


def to_correction(written: LatencyCorrection | None) -> Correction:
    """Convert to the planner's type."""
    if written is None:
        return NO_CORRECTION
    return Correction(written.prefill, written.decode, written.num_requests)


def from_correction(correction: Correction, of: str) -> LatencyCorrection | None:
    """Convert to the status' type; None: nothing is corrected."""
    if correction.is_identity:
        return None
    return LatencyCorrection(
        prefill=correction.prefill,
        decode=correction.decode,
        num_requests=correction.num_requests,
        of=of,
    )
