"""Computes the points behind the page's sliders: the best plan for every rate and SLO.

Pure. Only the plans of the result and their neighbours are considered: a rate above a plan's
goodput is served by complete copies of it. A new search with other targets may find a better one;
the page says so.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from cleave.planner.plan import Plan
from cleave.report.load_study import SCALES, LoadStudy, RateSweep, interpolate_goodput

RATES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
"""Factors on the requested rate."""


@dataclass(frozen=True, slots=True)
class WhatIfPoint:
    """The best plan at one rate and one SLO, by the requested objective."""

    plan: int
    """Index of the plan in the study's sweeps; -1: none meets this SLO with the available GPUs."""
    goodput: float
    """Goodput of one copy, in req/s."""
    copies: int
    gpus: int
    """GPUs of all copies."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The points of all combinations."""

    rates: tuple[float, ...]
    ttft_ms: tuple[float, ...]
    tpot_ms: tuple[float, ...]
    points: tuple[WhatIfPoint, ...]
    """Ordered by rate, then TTFT, then TPOT."""

    @property
    def start(self) -> tuple[int, int, int]:
        """Slider positions of the requested rate, TTFT and TPOT."""
        return RATES.index(1.0), SCALES.index(1.0), SCALES.index(1.0)


def compute_what_if(study: LoadStudy) -> WhatIf:
    """Compute every combination of RATES and SCALES."""
    slo, target = study.report_input.slo, study.report_input.slo.attainment
    goodputs = [_compute_goodputs(sweep, target) for sweep in study.sweeps]
    rates = tuple(factor * study.report_input.rate for factor in RATES)
    return WhatIf(
        rates=rates,
        ttft_ms=tuple(scale * slo.ttft_ms for scale in SCALES),
        tpot_ms=tuple(scale * slo.tpot_ms for scale in SCALES),
        points=tuple(
            _select_best(study, [table[ttft][tpot] for table in goodputs], rate)
            for rate, ttft, tpot in product(rates, range(len(SCALES)), range(len(SCALES)))
        ),
    )


def _select_best(study: LoadStudy, goodputs: Sequence[float], rate: float) -> WhatIfPoint:
    """The plan with least resources that serves `rate`; among equals the one with most goodput."""
    sweeps = study.sweeps
    feasible = [
        WhatIfPoint(index, rate_served, copies, copies * sweep.plan.gpus)
        for index, (sweep, rate_served) in enumerate(zip(sweeps, goodputs, strict=True))
        if rate_served > 0
        and (copies := math.ceil(rate / rate_served)) * sweep.plan.gpus
        <= study.report_input.max_gpus
    ]

    def rank(point: WhatIfPoint) -> tuple[float, float]:
        taken = point.copies * _compute_resources(sweeps[point.plan].plan, study.report_input.rate)
        return taken, -point.goodput * point.copies

    return min(feasible, key=rank, default=WhatIfPoint(plan=-1, goodput=0.0, copies=0, gpus=0))


def _compute_resources(plan: Plan, rate: float) -> float:
    """Resources of one copy in the unit of the objective, derived from `score`."""
    served = min(plan.prediction.goodput, rate)
    return served / plan.score if served and plan.score else float(plan.gpus)


def _compute_goodputs(sweep: RateSweep, target: float) -> list[list[float]]:
    """Goodput by TTFT and TPOT scale, scaled to the predicted goodput for the requested SLO."""
    by_scale = sweep.attainment_by_scale
    raw = [
        [
            interpolate_goodput(sweep.rates, by_scale[:, ttft, tpot].tolist(), target)
            for tpot in range(len(SCALES))
        ]
        for ttft in range(len(SCALES))
    ]
    unscaled = SCALES.index(1.0)
    predicted, interpolated = sweep.plan.prediction.goodput, raw[unscaled][unscaled]
    factor = predicted / interpolated if predicted and interpolated else 1.0
    return [[factor * value for value in row] for row in raw]
