"""The tightest feasible SLO where the requested one is infeasible: one factor on the targets that
are missed.

Called by the search when no plan serves the rate. What is hard: a search per factor would take
long. One simulation of a plan yields the factor by which each request missed its targets; the
quantile of these factors at the required attainment is the factor from which the plan meets the
SLO.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from cleave.api.role import Role
from cleave.planner.plan import NearestSlo
from cleave.planner.problem import Problem
from cleave.planner.search import capacity_bound, packing, replication
from cleave.planner.search.candidate_placement import (
    CandidatePlacement,
    InstanceGroup,
    build_cell,
    describe,
)
from cleave.planner.search.candidates import Candidate, build_decode, build_mixed, build_prefill
from cleave.planner.search.context import SearchContext
from cleave.planner.search.trials import ITL_LEVEL, LATENCIES, Targets
from cleave.simulator.outcome import compute_quantile

_SHORTLIST_SIZE = 5
"""Candidates per phase that are paired."""
_STEP = 1.05
_MAX_STEPS = 12
_MIN_SCALE = 1.01
"""No plan meets the requested SLO, although a short trial may say so by chance."""
_INSTANCE_SURPLUS = 4.0
"""Plans are tried with this many times the instances that the rate needs at least."""


@dataclass(frozen=True, slots=True)
class _ScaledPlacement:
    placement: CandidatePlacement
    scale: float


def find_nearest_slo(search: SearchContext, candidates: Sequence[Candidate]) -> NearestSlo | None:
    """The smallest multiple of the targets that some plan meets at the requested rate; a target
    that it meets as requested stays. None: no multiple was found, mostly because the GPUs cannot
    serve the rate at any latency."""
    options = [
        _ScaledPlacement(placement, _compute_scale(search, placement))
        for placement in _list_plans(search, candidates)
    ]
    best = min(options, key=lambda option: option.scale, default=None)
    if best is None or math.isinf(best.scale):
        return None
    scale = _confirm_scale(search, best)
    if scale is None:
        return None
    found = _retain_met_target(search, best.placement, scale)
    itl_p99_ms = found.itl_p99_ms if math.isfinite(found.itl_p99_ms) else None
    return NearestSlo(scale, found.ttft_ms, found.tpot_ms, itl_p99_ms, describe(best.placement))


def _list_plans(search: SearchContext, found: Sequence[Candidate]) -> Iterator[CandidatePlacement]:
    """Colocated and disaggregated plans with spare instances, as far as the nodes have room."""
    problem, lengths = search.problem, search.trials.get_lengths()
    for candidate in found:
        for batching in problem.policies.mixed:
            group = InstanceGroup(Role.MIXED, build_mixed(problem, candidate, batching), 1)
            single = CandidatePlacement((group,))
            bound = capacity_bound.compute_fleet_rate(build_cell(problem, single), lengths)
            limit = math.ceil(_INSTANCE_SURPLUS * problem.rate / bound)
            if copies := packing.count_copies(problem, single, limit):
                plenty = CandidatePlacement((replace(group, replicas=copies),))
                yield replication.divide_into_cells(plenty)
    if not search.may_disaggregate:
        return
    for prefill, decode in product(*_build_shortlists(found, lengths)):
        sizes = prefill.parallelism, decode.parallelism
        if prefill.supply == decode.supply and problem.can_pair(*sizes):
            groups = [
                InstanceGroup(Role.PREFILL, build_prefill(problem, prefill), 1),
                InstanceGroup(Role.DECODE, build_decode(problem, decode), 1),
            ]
            yield from _list_disaggregated(problem, groups, lengths)


def _build_shortlists(
    candidates: Sequence[Candidate], lengths: capacity_bound.LengthStatistics
) -> tuple[list[Candidate], list[Candidate]]:
    """Candidates by shortest prefill of a mean prompt and by decode step; the smaller of equals."""

    def prefill_ms(candidate: Candidate) -> float:
        return candidate.estimate.timing.predict_prefill_ms([round(lengths.prompt_tokens)])

    def decode_ms(candidate: Candidate) -> float:
        return candidate.estimate.timing.predict_decode_ms(1, round(lengths.decode_context))

    by_size = sorted(candidates, key=lambda each: each.gpus)
    prefills, decodes = sorted(by_size, key=prefill_ms), sorted(by_size, key=decode_ms)
    return prefills[:_SHORTLIST_SIZE], decodes[:_SHORTLIST_SIZE]


def _list_disaggregated(
    problem: Problem, groups: list[InstanceGroup], lengths: capacity_bound.LengthStatistics
) -> Iterator[CandidatePlacement]:
    bounds = [
        capacity_bound.compute_prefill_rate(groups[0].instance.engine, lengths),
        capacity_bound.compute_decode_rate(groups[1].instance.engine, lengths),
    ]
    replicated = tuple(
        replace(group, replicas=max(1, math.ceil(_INSTANCE_SURPLUS * problem.rate / bound)))
        for group, bound in zip(groups, bounds, strict=True)
    )
    plenty = replication.divide_into_cells(CandidatePlacement(replicated))
    if packing.has_room(problem, plenty):
        yield plenty
    elif (filled := replication.fill_by_ratio(problem, groups, bounds)) is not None:
        yield filled


def _compute_scale(search: SearchContext, placement: CandidatePlacement) -> float:
    """Smallest factor on all targets that enough requests meet."""
    trials, targets, rate = search.trials, search.targets, search.problem.rate / placement.copies
    fleet = build_cell(search.problem, placement)
    span = trials.compute_span(rate, targets)
    if capacity_bound.compute_fleet_rate(fleet, trials.get_lengths(span.total)) <= rate:
        return math.inf  # its queues grow without bound, which a finite trace does not show
    outcome = trials.simulate(fleet, rate, span)
    ttft = outcome.ttft_ms[span.window] / targets.ttft_ms
    tpot = outcome.tpot_ms[span.window] / targets.tpot_ms
    return max(
        compute_quantile(np.maximum(ttft, tpot), targets.attainment),
        compute_quantile(ttft, targets.ttft_attainment),
        compute_quantile(tpot, targets.tpot_attainment),
        outcome.itl.compute_quantile(ITL_LEVEL) / targets.itl_p99_ms,
    )


def _confirm_scale(search: SearchContext, option: _ScaledPlacement) -> float | None:
    """The factor again, by trials as long as the looser targets need; None: no convergence."""
    scale = max(option.scale, _MIN_SCALE)
    for _ in range(_MAX_STEPS):
        if _are_targets_met(search, option.placement, search.targets.scale(scale)):
            return scale
        scale *= _STEP
    return None


def _retain_met_target(
    search: SearchContext, placement: CandidatePlacement, scale: float
) -> Targets:
    """Targets that the plan meets: those that may stay as requested, the others scaled."""
    found = search.targets.scale(scale)
    for name in LATENCIES:
        tighter = replace(found, **{name: getattr(search.targets, name)})
        is_new = tighter not in (found, search.targets)
        if is_new and _are_targets_met(search, placement, tighter):
            found = tighter
    return found


def _are_targets_met(
    search: SearchContext, placement: CandidatePlacement, targets: Targets
) -> bool:
    """Whether one cell meets these targets at its share of the rate."""
    shares = replace(search, targets=targets).measure_shares(
        placement, search.problem.rate / placement.copies
    )
    return shares.both >= targets.attainment
