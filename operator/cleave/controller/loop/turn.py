"""What one turn of the loop comes to, as values. Made by `replanning` and `following`."""

from dataclasses import dataclass

from cleave.api.observed import LatencyCorrection, PlanBasis
from cleave.controller.actions import PlanOutcome
from cleave.controller.conditions import Condition
from cleave.pods.labels import Manifest

DRIFTED, HOLDS = "PlanDrifted", "PredictionHolds"
"""Conditions."""
APPLIED, PROPOSED, CORRECTED = "Applied", "Proposed", "Corrected"
"""What came of a look, as status tells it."""


@dataclass(frozen=True, slots=True)
class Event:
    """What people are told once."""

    reason: str
    message: str
    is_warning: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the loop."""

    basis: PlanBasis | None = None
    """What the plan rests on from now on instead of the spec."""
    outcome: PlanOutcome | None = None
    """The planner's last answer, as far as it is one about a plan."""
    question: PlanOutcome | None = None
    """What to ask the planner."""
    conditions: tuple[Condition, ...] = ()
    events: tuple[Event, ...] = ()
    correction: LatencyCorrection | None = None
    prediction: Manifest | None = None
    plans: tuple[Manifest, ...] = ()
    advice: Manifest | None = None
    """With replan.mode Advisory: the plan that would be applied."""
