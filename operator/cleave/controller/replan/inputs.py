"""Inputs of a plan: the spec, observed traffic and the latency model's correction. Pure.

The last two are kept in the status, so that a restarted operator neither loses them nor measures
them again. Each records the hash of the spec fields that it was measured for, and is valid while
they are the same.
"""

from dataclasses import dataclass
from functools import cached_property

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
from cleave.planner.resolved_deployment import ResolvedDeployment

_WHOLE_PARTS = ("model", "slo", "workload", "planning", "engine")
"""Parts of the spec that are inputs of a plan; of `routing` only the policy is."""
_OF_NO_PLAN = ("mode", "replan", "min_gpus", "priority")
"""Fields of `planning` that are no inputs: the last two say which GPUs there are."""


@dataclass(frozen=True)
class PlanInputs:
    """Inputs of the plan of one deployment; each part is computed once per reconcile."""

    resolved: ResolvedDeployment
    inventory: Inventory
    model_fault: str = ""
    """Why the ConfigMap with the model's config.json is not usable; empty: nothing waits for it."""

    @property
    def deployment(self) -> LLMDeployment:
        """As its author wrote it."""
        return self.resolved.written

    @property
    def unknown_model(self) -> str | None:
        """Why the planner does not know the model; None: it does."""
        return self.resolved.unknown_model

    @cached_property
    def workload_hash(self) -> str:
        """Hash of the spec's traffic."""
        return hash_workload(self.deployment)

    @cached_property
    def model_hash(self) -> str:
        """Hash of the inputs of latencies: model, engine and kinds of nodes."""
        parts = self.deployment.spec.model_dump(
            mode="json",
            exclude_defaults=True,
            include={"model", "engine"},
            exclude={"model": {"cache"}},
        )
        return hash_content([parts, self._node_kinds])

    @cached_property
    def _spec_parts(self) -> list[object]:
        spec = self.deployment.spec
        exclude = {"engine": {"env", "image"}, "planning": set(_OF_NO_PLAN), "model": {"cache"}}
        parts = spec.model_dump(
            mode="json",
            exclude_defaults=True,
            include={**dict.fromkeys(_WHOLE_PARTS, True), "routing": {"policy"}},
            exclude=exclude,
        )
        given = {name: part for name, part in parts.items() if part}
        base: list[object] = [given, self._node_kinds]
        # With scaled roles the plan needs a scaling law as well.
        return [*base, "growth"] if spec.scaling.roles else base

    @property
    def _node_kinds(self) -> str:
        """Emulated engines run on any node."""
        is_vllm = self.deployment.spec.engine.type is EngineType.VLLM
        return self.inventory.node_kinds_hash if is_vllm else ""

    def hash_with(self, fitted: FittedPlanInputs | None) -> str:
        """Hash all inputs of a plan; the engine's env and image are not among them. `fitted`
        replaces the spec's traffic and corrects the latency model; None: neither."""
        if fitted is None:
            return hash_content(self._spec_parts)
        return hash_content([*self._spec_parts, fitted.model_dump(mode="json")])

    def read_fitted(self, status: Manifest) -> FittedPlanInputs | None:
        """Return the inputs that replace the spec's; None: the plan is made from the spec."""
        fitted = _read_valid(self.workload_hash, status)
        if fitted and fitted.correction and fitted.correction.of != self.model_hash:
            return fitted.model_copy(update={"correction": None})
        return fitted

    def read_correction(self, status: Manifest) -> LatencyCorrection | None:
        """Return the correction of the latency model; None: there is none for this model."""
        try:
            correction = LatencyCorrection.read_status(status.get("correction"))
        except ValidationError:
            return None
        return correction if correction.of == self.model_hash else None


def get_planned_workload(deployment: LLMDeployment, status: Manifest) -> Workload | None:
    """Return the traffic that the plan was made for; None: no traffic was given or observed."""
    fitted = _read_valid(hash_workload(deployment), status)
    return fitted.workload if fitted else deployment.spec.workload


def _read_valid(workload_hash: str, status: Manifest) -> FittedPlanInputs | None:
    try:
        fitted = FittedPlanInputs.read_status(status.get("basis"))
    except ValidationError:
        return None
    return fitted if fitted.of == workload_hash else None


def hash_workload(deployment: LLMDeployment) -> str:
    """Hash the traffic of the spec."""
    workload = deployment.spec.workload
    parts = workload.model_dump(mode="json", exclude_defaults=True) if workload else None
    return hash_content(parts)


def read_placement(written: Manifest) -> Placement:
    """Read the placement from `status.plan`. Raises ValueError when it is not readable."""
    selected = SelectedPlan.read_status(written)
    pools = tuple(map(to_planned_pool, selected.pools))
    return Placement(pools, selected.reason, None, selected.max_model_len)


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
