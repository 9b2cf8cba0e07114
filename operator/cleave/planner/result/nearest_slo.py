"""The tightest feasible SLO where the requested one is infeasible: both targets times one factor.

Called by the search when no plan serves the rate. What is hard: a search per factor would take
long. One simulation of a plan yields the factor by which each request missed its targets; the
quantile of these factors at the required attainment is the factor from which the plan meets the
SLO.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cleave.api.role import Role
from cleave.planner.plan import NearestSlo
from cleave.planner.problem import Problem
from cleave.planner.search import capacity_bound, packing, replication
from cleave.planner.search.candidate_placement import Draft, Group, cell_fleet, describe
from cleave.planner.search.candidates import (
    Candidate,
    decode_instance,
    mixed_instance,
    prefill_instance,
)
from cleave.planner.search.trials import Targets, Trials

_SHORT = 5
"""Candidates per phase that are paired."""
_STEP = 1.05
_MOST_STEPS = 12
_UNHURRIED = 4.0
"""Plans are tried with this many times the instances that the rate needs at least."""


@dataclass(frozen=True, slots=True)
class _Option:
    draft: Draft
    scale: float


def nearest_slo(
    problem: Problem, trials: Trials, candidates: Sequence[Candidate], targets: Targets
) -> NearestSlo | None:
    """The smallest multiple of both targets that some plan meets at the requested rate.

    None: none was found, mostly because the GPUs cannot serve the rate at any latency.
    """
    options = [
        _Option(placement, _scale(problem, trials, placement, targets))
        for placement in _drafts(problem, trials, candidates)
    ]
    best = min(options, key=lambda option: option.scale, default=None)
    if best is None or math.isinf(best.scale):
        return None
    scale = _confirmed(problem, trials, best, targets)
    if scale is None:
        return None
    return NearestSlo(scale, targets.ttft_ms * scale, targets.tpot_ms * scale, describe(best.draft))


def _drafts(problem: Problem, trials: Trials, candidates: Sequence[Candidate]) -> Iterator[Draft]:
    """Colocated and disaggregated plans with spare instances, as far as the nodes have room."""
    lengths, rate = trials.lengths(), problem.rate
    for candidate in candidates:
        for batching in problem.policies.mixed:
            group = Group(Role.MIXED, mixed_instance(problem, candidate, batching), 1)
            single_instance = Draft((group,))
            bound = capacity_bound.fleet_rate(cell_fleet(problem, single_instance), lengths)
            copies = packing.most_copies(
                problem, single_instance, math.ceil(_UNHURRIED * rate / bound)
            )
            if copies:
                yield replication.celled(Draft((Group(group.role, group.instance, copies),)))
    prefills, decodes = _shortlists(candidates, lengths)
    for prefill in prefills:
        for decode in decodes:
            if prefill.supply == decode.supply and problem.can_pair(
                prefill.parallelism, decode.parallelism
            ):
                groups = [
                    Group(Role.PREFILL, prefill_instance(problem, prefill), 1),
                    Group(Role.DECODE, decode_instance(problem, decode), 1),
                ]
                yield from _split(problem, groups, lengths)


def _shortlists(
    candidates: Sequence[Candidate], lengths: capacity_bound.Lengths
) -> tuple[list[Candidate], list[Candidate]]:
    """Candidates with the shortest prefill of a mean prompt, and with the shortest decode step; the
    smaller of equals."""

    def prefill_ms(candidate: Candidate) -> float:
        return candidate.estimate.timing.prefill_ms([round(lengths.prompt_tokens)])

    def decode_ms(candidate: Candidate) -> float:
        return candidate.estimate.timing.decode_pass_ms(1, round(lengths.decode_context))

    by_size = sorted(candidates, key=lambda each: each.gpus)
    return sorted(by_size, key=prefill_ms)[:_SHORT], sorted(by_size, key=decode_ms)[:_SHORT]


def _split(
    problem: Problem, groups: list[Group], lengths: capacity_bound.Lengths
) -> Iterator[Draft]:
    bounds = [
        capacity_bound.prefill_rate(groups[0].instance.engine, lengths),
        capacity_bound.decode_rate(groups[1].instance.engine, lengths),
    ]
    replicated = tuple(
        Group(g.role, g.instance, max(1, math.ceil(_UNHURRIED * problem.rate / bound)))
        for g, bound in zip(groups, bounds, strict=True)
    )
    plenty = replication.celled(Draft(replicated))
    if packing.fits(problem, plenty):
        yield plenty
    elif (filled := replication.filled(problem, groups, bounds)) is not None:
        yield filled


def _scale(problem: Problem, trials: Trials, placement: Draft, targets: Targets) -> float:
    """Smallest factor on both targets that enough requests meet."""
    fleet, rate = cell_fleet(problem, placement), problem.rate / placement.copies
    span = trials.span(rate, targets)
    if capacity_bound.fleet_rate(fleet, trials.lengths(span.total)) <= rate:
        return math.inf  # its queues would grow for ever; a finite trace does not show that
    outcome = trials.serve(fleet, rate, span)
    missed = np.maximum(
        outcome.ttft_ms[span.window] / targets.ttft_ms,
        outcome.tpot_ms[span.window] / targets.tpot_ms,
    )
    ended = np.where(np.isnan(missed), np.inf, missed)
    return float(np.quantile(ended, targets.attainment, method="higher"))


def _confirmed(problem: Problem, trials: Trials, option: _Option, targets: Targets) -> float | None:
    """The factor again, from trials as long as the looser targets need; None: it does not
    converge."""
    fleet, scale = cell_fleet(problem, option.draft), option.scale
    rate = problem.rate / option.draft.copies
    for _ in range(_MOST_STEPS):
        scaled = targets.scaled(scale)
        shares = trials.shares(fleet, rate, scaled, trials.span(rate, scaled))
        if shares.both >= targets.attainment:
            return scale
        scale *= _STEP
    return None
