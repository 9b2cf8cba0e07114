"""Goodput of many drafts, best first, without simulating the hopeless ones in full.

Used by both placement algorithms and by the colocated search. What is hard: there are hundreds of
drafts and a goodput takes eight simulations. Drafts are tried in the order of their bounds; one
whose bound is not above the best goodput per resource so far is skipped, and one that fails at
that rate is given up after one simulation. What remains unrated is below the best in any case.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cleave.planner import capacity, goodput
from cleave.planner.draft import Draft
from cleave.planner.goodput import Goodput
from cleave.planner.trials import Targets, Trials
from cleave.simulator.fleet import Fleet

Weigh = Callable[[Draft], float]
"""What a draft takes of what the objective counts."""


@dataclass(frozen=True, slots=True)
class Rated:
    """A draft and what it serves."""

    draft: Draft
    goodput: Goodput
    """Of one cell."""
    per_resource: float
    """Goodput by what the draft takes."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A draft that may be tried."""

    draft: Draft
    fleet: Fleet
    bound: float
    """No goodput of it is higher."""


def best(
    trials: Trials,
    entries: Iterable[Entry],
    targets: Targets,
    weigh: Weigh,
    tick: Callable[[], None] = lambda: None,
) -> Rated | None:
    """The one with most goodput per resource; None: none meets the targets at any rate.

    `tick` is called once per entry. Of equals, the one that takes less.
    """
    found: Rated | None = None
    ordered = sorted(
        ((each.bound / weigh(each.draft), -weigh(each.draft), each) for each in entries),
        key=lambda item: item[:2],
        reverse=True,
    )
    for bound, _, entry in ordered:
        tick()
        to_beat = found.per_resource if found else 0.0
        if bound <= to_beat:
            continue
        weight = weigh(entry.draft)
        rated = goodput.find(trials, entry.fleet, targets, at_least=to_beat * weight)
        if rated.rate / weight > to_beat:
            found = Rated(entry.draft, rated, rated.rate / weight)
    return found


def bounded(trials: Trials, draft: Draft, fleet: Fleet) -> Entry:
    """With the bound that the passes of its phases set."""
    return Entry(draft, fleet, capacity.fleet_rate(fleet, trials.lengths()))
