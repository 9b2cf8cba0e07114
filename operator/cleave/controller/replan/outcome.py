"""The outcome of replanning in one reconcile, as values. Built by `reconcile` and `verdict`."""

from dataclasses import dataclass

from cleave.api.replan_status import LatencyCorrection, PlanBasis
from cleave.controller.cluster.actions import PlanOutcome
from cleave.controller.cluster.conditions import Condition
from cleave.manifests.labels import Manifest

DRIFTED, HOLDS = "PlanDrifted", "PredictionHolds"
"""Condition types."""
APPLIED, PROPOSED, CORRECTED = "Applied", "Proposed", "Corrected"
"""Verdicts as `status.plans` records them."""


@dataclass(frozen=True, slots=True)
class Event:
    """An Event to emit once."""

    reason: str
    message: str
    is_warning: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """What replanning contributes to one reconcile of a deployment."""

    basis: PlanBasis | None = None
    """Inputs of the plan from now on, instead of the spec's; None: the spec's."""
    outcome: PlanOutcome | None = None
    """The planner's last result, or the plan that a review has put in force."""
    question: PlanOutcome | None = None
    """The request to submit to the planner."""
    conditions: tuple[Condition, ...] = ()
    events: tuple[Event, ...] = ()
    correction: LatencyCorrection | None = None
    prediction: Manifest | None = None
    plans: tuple[Manifest, ...] = ()
    advice: Manifest | None = None
    """With replan.mode Advisory: the plan that Auto would apply."""
