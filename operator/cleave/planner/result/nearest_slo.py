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
from cleave.planner.search.candidate_placement import (
    CandidatePlacement,
    InstanceGroup,
    build_cell_fleet,
    describe,
)
from cleave.planner.search.candidates import (
    Candidate,
    build_decode_instance,
    build_mixed_instance,
    build_prefill_instance,
)
from cleave.planner.search.trials import Targets, Trials

_SHORTLIST_SIZE = 5
"""Candidates per phase that are paired."""
_STEP = 1.05
_MAX_STEPS = 12
_INSTANCE_SURPLUS = 4.0
"""Plans are tried with this many times the instances that the rate needs at least."""


@dataclass(frozen=True, slots=True)
class _ScaledPlacement:
    placement: CandidatePlacement
    scale: float


def find_nearest_slo(
    problem: Problem, trials: Trials, candidates: Sequence[Candidate], targets: Targets
) -> NearestSlo | None:
    """The smallest multiple of both targets that some plan meets at the requested rate.

    None: none was found, mostly because the GPUs cannot serve the rate at any latency.
    """
    options = [
        _ScaledPlacement(placement, _compute_scale(problem, trials, placement, targets))
        for placement in _list_placements(problem, trials, candidates)
    ]
    best = min(options, key=lambda option: option.scale, default=None)
    if best is None or math.isinf(best.scale):
        return None
    scale = _confirm_scale(problem, trials, best, targets)
    if scale is None:
        return None
    return NearestSlo(
        scale, targets.ttft_ms * scale, targets.tpot_ms * scale, describe(best.placement)
    )


def _list_placements(
    problem: Problem, trials: Trials, candidates: Sequence[Candidate]
) -> Iterator[CandidatePlacement]:
    """Colocated and disaggregated plans with spare instances, as far as the nodes have room."""
    lengths, rate = trials.get_lengths(), problem.rate
    for candidate in candidates:
        for batching in problem.policies.mixed:
            group = InstanceGroup(Role.MIXED, build_mixed_instance(problem, candidate, batching), 1)
            single_instance = CandidatePlacement((group,))
            bound = capacity_bound.compute_fleet_rate(
                build_cell_fleet(problem, single_instance), lengths
            )
            copies = packing.count_copies(
                problem, single_instance, math.ceil(_INSTANCE_SURPLUS * rate / bound)
            )
            if copies:
                yield replication.divide_into_cells(
                    CandidatePlacement((InstanceGroup(group.role, group.instance, copies),))
                )
    prefills, decodes = _build_shortlists(candidates, lengths)
    for prefill in prefills:
        for decode in decodes:
            if prefill.supply == decode.supply and problem.can_pair(
                prefill.parallelism, decode.parallelism
            ):
                groups = [
                    InstanceGroup(Role.PREFILL, build_prefill_instance(problem, prefill), 1),
                    InstanceGroup(Role.DECODE, build_decode_instance(problem, decode), 1),
                ]
                yield from _list_disaggregated(problem, groups, lengths)


def _build_shortlists(
    candidates: Sequence[Candidate], lengths: capacity_bound.LengthStatistics
) -> tuple[list[Candidate], list[Candidate]]:
    """Candidates with the shortest prefill of a mean prompt, and with the shortest decode step; the
    smaller of equals."""

    def prefill_ms(candidate: Candidate) -> float:
        return candidate.estimate.timing.predict_prefill_ms([round(lengths.prompt_tokens)])

    def decode_ms(candidate: Candidate) -> float:
        return candidate.estimate.timing.predict_decode_ms(1, round(lengths.decode_context))

    by_size = sorted(candidates, key=lambda each: each.gpus)
    return sorted(by_size, key=prefill_ms)[:_SHORTLIST_SIZE], sorted(by_size, key=decode_ms)[
        :_SHORTLIST_SIZE
    ]


def _list_disaggregated(
    problem: Problem, groups: list[InstanceGroup], lengths: capacity_bound.LengthStatistics
) -> Iterator[CandidatePlacement]:
    bounds = [
        capacity_bound.compute_prefill_rate(groups[0].instance.engine, lengths),
        capacity_bound.compute_decode_rate(groups[1].instance.engine, lengths),
    ]
    replicated = tuple(
        InstanceGroup(
            g.role, g.instance, max(1, math.ceil(_INSTANCE_SURPLUS * problem.rate / bound))
        )
        for g, bound in zip(groups, bounds, strict=True)
    )
    plenty = replication.divide_into_cells(CandidatePlacement(replicated))
    if packing.has_room(problem, plenty):
        yield plenty
    elif (filled := replication.fill_by_ratio(problem, groups, bounds)) is not None:
        yield filled


def _compute_scale(
    problem: Problem, trials: Trials, placement: CandidatePlacement, targets: Targets
) -> float:
    """Smallest factor on both targets that enough requests meet."""
    fleet, rate = build_cell_fleet(problem, placement), problem.rate / placement.copies
    span = trials.compute_span(rate, targets)
    if capacity_bound.compute_fleet_rate(fleet, trials.get_lengths(span.total)) <= rate:
        return math.inf  # its queues grow without bound, which a finite trace does not show
    outcome = trials.simulate(fleet, rate, span)
    missed = np.maximum(
        outcome.ttft_ms[span.window] / targets.ttft_ms,
        outcome.tpot_ms[span.window] / targets.tpot_ms,
    )
    ended = np.where(np.isnan(missed), np.inf, missed)
    return float(np.quantile(ended, targets.attainment, method="higher"))


def _confirm_scale(
    problem: Problem, trials: Trials, option: _ScaledPlacement, targets: Targets
) -> float | None:
    """The factor again, from trials as long as the looser targets need; None: it does not
    converge."""
    fleet, scale = build_cell_fleet(problem, option.placement), option.scale
    rate = problem.rate / option.placement.copies
    for _ in range(_MAX_STEPS):
        scaled = targets.scale(scale)
        shares = trials.measure_shares(fleet, rate, scaled, trials.compute_span(rate, scaled))
        if shares.both >= targets.attainment:
            return scale
        scale *= _STEP
    return None
