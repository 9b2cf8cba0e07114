"""The points behind the sliders."""

import math
from dataclasses import replace

import pytest

from cleave.report.load_study import SCALES
from cleave.report.what_if import RATES, WhatIf, WhatIfPoint, compute_what_if


def get_point(points: WhatIf, rate: int, ttft: int, tpot: int) -> WhatIfPoint:
    return points.points[(rate * len(SCALES) + ttft) * len(SCALES) + tpot]


def test_there_is_a_point_for_every_place_of_the_three_sliders(study) -> None:
    points = compute_what_if(study)
    assert len(points.points) == len(RATES) * len(SCALES) ** 2
    assert (points.rates[points.start[0]], points.ttft_ms[points.start[1]]) == (5.0, 400.0)
    assert points.tpot_ms[points.start[2]] == 40.0


def test_at_the_declared_slo_a_plan_has_the_goodput_of_the_answer(study) -> None:
    points = compute_what_if(study)
    start = get_point(points, *points.start)
    assert start.goodput == pytest.approx(study.sweeps[start.plan].plan.prediction.goodput)


def test_the_point_takes_the_fewest_gpus_that_carry_the_rate(study) -> None:
    points = compute_what_if(study)
    start = get_point(points, *points.start)
    able = [s.plan.gpus for s in study.sweeps if s.plan.prediction.goodput >= 5.0]
    assert start.gpus == min(able)
    assert start.goodput * start.copies >= 5.0


def test_where_price_is_the_objective_the_cheapest_is_the_best(study) -> None:
    dear = {0: 100.0, 1: 200.0, 2: 1.0}
    sweeps = tuple(
        replace(s, plan=replace(s.plan, score=min(s.plan.prediction.goodput, 5.0) / dear[i]))
        for i, s in enumerate(study.sweeps[:3])
    )
    priced = compute_what_if(replace(study, sweeps=sweeps))
    assert get_point(priced, *priced.start).plan == 2


def test_more_traffic_never_needs_fewer_copies_of_a_plan(study) -> None:
    points = compute_what_if(study)
    _, ttft, tpot = points.start
    for rate, declared_rate in enumerate(points.rates):
        point = get_point(points, rate, ttft, tpot)
        assert point.copies == math.ceil(declared_rate / point.goodput)
        assert point.gpus == point.copies * study.sweeps[point.plan].plan.gpus


def test_a_relaxed_target_never_takes_more_gpus(study) -> None:
    points = compute_what_if(study)
    rate, ttft, _ = points.start
    row = [get_point(points, rate, ttft, tpot) for tpot in range(len(SCALES))]
    num_gpus = [point.gpus if point.plan >= 0 else 10**6 for point in row]
    assert num_gpus == sorted(num_gpus, reverse=True)


def test_what_needs_more_gpus_than_there_are_is_no_point(study) -> None:
    few = replace(study, report_input=replace(study.report_input, max_gpus=2))
    points = compute_what_if(few)
    assert get_point(points, len(RATES) - 1, *points.start[1:]).plan == -1
