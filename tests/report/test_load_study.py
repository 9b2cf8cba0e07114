"""What the page shows, computed: sweeps, goodput on a curve, rivals."""

import math
from dataclasses import replace

import numpy as np
import pytest

from cleave.report.load_study import (
    LOADS,
    SCALES,
    interpolate_goodput,
    run_study,
    select_plans,
    select_rivals,
)


def test_goodput_is_where_the_line_between_two_rates_crosses_the_target() -> None:
    assert interpolate_goodput((1.0, 2.0, 3.0), (1.0, 0.95, 0.85), 0.9) == pytest.approx(2.5)


def test_goodput_is_nothing_when_the_lowest_rate_misses_and_the_top_when_none_does() -> None:
    assert interpolate_goodput((1.0, 2.0), (0.5, 1.0), 0.9) == 0.0
    assert interpolate_goodput((1.0, 2.0), (1.0, 0.9), 0.9) == 2.0


def test_goodput_ends_at_the_first_fall_even_if_attainment_recovers() -> None:
    assert interpolate_goodput((1.0, 2.0, 3.0), (1.0, 0.8, 1.0), 0.9) == pytest.approx(1.5)


def test_the_rival_is_the_best_of_the_other_kind(answer) -> None:
    every = (answer.selected, *answer.alternatives)
    best, other = select_rivals(every)
    assert best is answer.selected
    assert other is next(plan for plan in every if not plan.is_disaggregated)
    assert select_rivals(()) == ()


def test_the_other_kind_is_shown_however_far_down_it_is(answer) -> None:
    disaggregated = [plan for plan in answer.alternatives if plan.is_disaggregated]
    colocated = next(plan for plan in answer.alternatives if not plan.is_disaggregated)
    many = [replace(disaggregated[0], score=float(i)) for i in range(12)]
    assert select_plans(replace(answer, alternatives=(*many, colocated)))[-1] is colocated


def test_every_plan_is_swept_from_idle_to_overload(study) -> None:
    assert len(study.sweeps) == 1 + len(study.result.alternatives)
    for sweep in study.sweeps:
        assert sweep.rates == pytest.approx([f * sweep.plan.prediction.goodput for f in LOADS])
        assert sweep.attainment[0] > sweep.attainment[-1]


def test_attainment_by_scale_at_the_declared_slo_is_the_attainment(study) -> None:
    declared_index = SCALES.index(1.0)
    for sweep in study.sweeps:
        assert sweep.attainment_by_scale[:, declared_index, declared_index] == pytest.approx(
            sweep.attainment
        )


def test_attainment_never_falls_when_a_target_is_relaxed(study) -> None:
    for sweep in study.sweeps:
        for axis in (1, 2):
            assert np.all(np.diff(sweep.attainment_by_scale, axis=axis) >= 0)


def test_a_request_that_never_ends_is_the_worst_of_all(subject, answer, bench) -> None:
    class Losing:
        def simulate_plan(self, plan, rate):
            outcome = bench.simulate_plan(plan, rate)
            outcome.first_token_ms[:30] = outcome.end_ms[:30] = math.nan
            return outcome

    found = run_study(subject, answer, Losing()).latencies[0]
    assert found.ttft_ms[-1] == math.inf
    assert math.isfinite(found.ttft_ms[100])
    assert sum(found.stages.values()) == pytest.approx(1)


def test_an_answer_without_a_plan_is_a_study_without_simulations(subject, infeasible) -> None:
    empty = run_study(subject, infeasible, bench=None)
    assert empty.sweeps == empty.latencies == ()
