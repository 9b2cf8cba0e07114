"""What plans rest on besides the spec: traffic that was seen, and the model's correction. Pure.

Kept in status, so that an operator that starts anew neither loses it nor learns it again; each part
names by a digest what it was learnt for, and counts as long as the spec states the same.
"""

from pydantic import ValidationError

from cleave.api.deployment import LLMDeployment
from cleave.api.engine import EngineType
from cleave.api.observed import LatencyCorrection, PlanBasis
from cleave.api.workload import Workload
from cleave.controller.inventory import Inventory
from cleave.controller.wanted import digest
from cleave.perf.corrected import NONE, Correction
from cleave.pods.labels import Manifest


def standing(deployment: LLMDeployment, status: Manifest, there: Inventory) -> PlanBasis | None:
    """What the plan rests on instead of the spec; None: on the spec."""
    basis = _read(deployment, status)
    if basis and basis.correction and basis.correction.of != model_digest(deployment, there):
        return basis.model_copy(update={"correction": None})
    return basis


def planned_for(deployment: LLMDeployment, status: Manifest) -> Workload | None:
    """The traffic that the plan was made for; None: for none that was stated or seen."""
    basis = _read(deployment, status)
    return basis.workload if basis else deployment.spec.workload


def _read(deployment: LLMDeployment, status: Manifest) -> PlanBasis | None:
    try:
        basis = PlanBasis.model_validate(status.get("basis"), by_alias=True)
    except ValidationError:
        return None
    return basis if basis.of == traffic_digest(deployment) else None


def corrected(
    deployment: LLMDeployment, status: Manifest, there: Inventory
) -> LatencyCorrection | None:
    """What is known of the latency model's error; None: nothing."""
    try:
        found = LatencyCorrection.model_validate(status.get("correction"), by_alias=True)
    except ValidationError:
        return None
    return found if found.of == model_digest(deployment, there) else None


def traffic_digest(deployment: LLMDeployment) -> str:
    """Of the traffic that the spec states."""
    stated = deployment.spec.workload
    return digest(stated.model_dump(mode="json", exclude_defaults=True) if stated else None)


def model_digest(deployment: LLMDeployment, there: Inventory) -> str:
    """Of what latencies depend on."""
    spec = deployment.spec
    parts = spec.model_dump(
        mode="json",
        exclude_defaults=True,
        include={"model", "engine"},
        exclude={"model": {"cache"}},
    )
    kinds = there.kinds if spec.engine.type is EngineType.VLLM else ""
    return digest([parts, kinds])


def to_correction(written: LatencyCorrection | None) -> Correction:
    """As the planner has it."""
    if written is None:
        return NONE
    return Correction(written.prefill, written.decode, written.num_requests)


def from_correction(correction: Correction, of: str) -> LatencyCorrection | None:
    """As status has it; None: nothing is corrected."""
    if correction.is_none:
        return None
    return LatencyCorrection(
        prefill=correction.prefill,
        decode=correction.decode,
        num_requests=correction.num_requests,
        of=of,
    )
