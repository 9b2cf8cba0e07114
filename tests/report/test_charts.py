"""Charts: what is drawn, what is said, and the same in a table."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.planner.words import percent
from cleave.report.charts import attainment, cdf, charts, frontier, pareto, stages, tradeoff
from cleave.simulator.breakdown import Stage

KEYS = ["attainment", "cdf-ttft", "cdf-tpot", "stages", "frontier"]
KEYS += ["tradeoff-ttft", "tradeoff-tpot"]


def test_every_chart_has_a_note_and_its_numbers(made) -> None:
    found = list(charts(made))
    assert [chart.key for chart in found] == KEYS
    for chart in found:
        assert chart.note.endswith(".")
        assert chart.rows
        assert {len(row) for row in chart.rows} == {len(chart.heading)}


def test_every_colour_is_one_of_the_theme(made) -> None:
    for chart in charts(made):
        text = chart.figure.to_json()
        assert "var(--" in text
        assert "#" not in text


def test_attainment_shows_goal_asked_rate_and_both_kinds(made) -> None:
    chart = attainment(made)
    texts = [note.text for note in chart.figure.layout.annotations]
    assert texts == ["goal 90 %", "asked 5.00 req/s"]
    assert "4M tp1 (4 GPUs)" in [trace.name for trace in chart.figure.data]


def test_a_cdf_says_the_share_within_the_target(made) -> None:
    values = made.latencies[1].ttft_ms
    share = sum(ms <= 400 for ms in values) / len(values)
    assert f"4M tp1 meets 400 ms for {percent(share)} of requests" in cdf(made, "ttft").note


def test_stage_shares_add_up_to_one(made) -> None:
    chart = stages(made)
    assert [trace.name for trace in chart.figure.data] == [str(stage) for stage in Stage]
    for shares in zip(*(trace.x for trace in chart.figure.data), strict=True):
        assert sum(shares) == pytest.approx(1)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=30))
def test_nothing_beats_the_frontier_and_all_else_is_beaten(points) -> None:
    kept = pareto(points)
    for place, (cost, worth) in enumerate(points):
        beaten = any(c <= cost and w >= worth for c, w in (points[i] for i in kept))
        assert beaten
        if place in kept:
            assert not any(c <= cost and w >= worth and (c, w) != (cost, worth) for c, w in points)


def test_without_prices_the_frontier_counts_gpus(made) -> None:
    def free(plan):
        return replace(plan, prediction=replace(plan.prediction, cost_per_hour=0.0))

    answer = replace(
        made.answer,
        selected=free(made.answer.selected),
        alternatives=tuple(map(free, made.answer.alternatives)),
    )
    chart = frontier(replace(made, answer=answer))
    assert chart.heading[1] == "GPUs"
    assert chart.rows[0][1] == "6.00"


def test_latencies_that_lie_far_apart_get_a_logarithmic_axis(made) -> None:
    slow = made.answer.alternatives[0]
    late = replace(slow.prediction, ttft_ms=replace(slow.prediction.ttft_ms, p90=90_000.0))
    answer = replace(made.answer, alternatives=(replace(slow, prediction=late),))
    assert tradeoff(replace(made, answer=answer), "ttft").figure.layout.xaxis.type == "log"
    near = replace(made.answer, alternatives=made.answer.alternatives[:3])
    assert tradeoff(replace(made, answer=near), "ttft").figure.layout.xaxis.type is None
