"""The outcome of replanning in one reconcile, as values. Built by `reconcile` and `verdict`."""

from dataclasses import dataclass

from cleave.api.replan_status import FittedPlanInputs, LatencyCorrection
from cleave.controller.cluster.actions import PlanJob
from cleave.controller.cluster.conditions import ConditionState
from cleave.manifests.labels import Manifest

PLAN_DRIFTED, PREDICTION_HOLDS = "PlanDrifted", "PredictionHolds"
"""Condition types."""
APPLIED, PROPOSED, CORRECTED = "Applied", "Proposed", "Corrected"
"""Verdicts as `status.plans` records them."""


@dataclass(frozen=True, slots=True)
class ReplanEvent:
    """An Event to emit once."""

    reason: str
    message: str
    is_warning: bool = False


@dataclass(frozen=True, slots=True)
class ReplanOutcome:
    """The contribution of replanning to one reconcile of a deployment."""

    fitted_inputs: FittedPlanInputs | None = None
    """Inputs of the plan from now on, instead of the spec's; None: the spec's."""
    plan_result: PlanJob | None = None
    """The planner's last result, or the plan that a review has applied."""
    plan_request: PlanJob | None = None
    """The request to submit to the planner."""
    conditions: tuple[ConditionState, ...] = ()
    events: tuple[ReplanEvent, ...] = ()
    correction: LatencyCorrection | None = None
    prediction: Manifest | None = None
    plans: tuple[Manifest, ...] = ()
    advice: Manifest | None = None
    """With replan.mode Advisory: the plan that Auto would apply."""
