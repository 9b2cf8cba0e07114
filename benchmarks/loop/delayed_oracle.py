"""The upper bound for any planner that must observe a change first: the oracle, delayed."""

from collections.abc import Sequence

import numpy as np
from replanning import START_S, Step, to_fleet
from virtual_fleet import PERIOD_S, VirtualFleet

from cleave.planner.problem import Problem
from cleave.planner.replan.replay import RunningPlan
from cleave.traffic.drift_detector import DriftDetector, update_detector


def wait_for(
    virtual_fleet: VirtualFleet, real: Problem, plans: Sequence[RunningPlan], edges: Sequence[float]
) -> list[Step]:
    """Each phase's plan is ordered when the operator's detector sees its change, and then starts.

    What it wants for the new phase is known at once, and a false alarm is known for one.
    """
    steps: list[Step] = []
    detector, ordered = DriftDetector(), 0
    pending: Step | None = None
    for now_s in np.arange(PERIOD_S, edges[-1], PERIOD_S).tolist():
        (window,) = virtual_fleet.look(now_s - PERIOD_S, now_s)
        detector, change = update_detector(detector, window)
        if pending is not None and now_s >= pending.at_s:
            virtual_fleet.change(to_fleet(real, pending.running_plan), now_s)
            steps.append(pending)
            pending = None
        phase = int(np.searchsorted(edges, now_s)) - 1
        if change is not None and phase > ordered:
            ordered = phase
            pending = Step(now_s, now_s, now_s + START_S, plans[phase])
    return steps
