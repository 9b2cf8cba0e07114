"""Charts: what is drawn, what is said, and the same in a table."""

import pytest

from cleave.planner.result.text import format_percent
from cleave.report.charts import (
    build_attainment_chart,
    build_cdf_chart,
    build_charts,
    build_stages_chart,
)
from cleave.simulator.outcome import LatencyStage

KEYS = ["attainment", "cdf-ttft", "cdf-tpot", "stages", "frontier"]
KEYS += ["tradeoff-ttft", "tradeoff-tpot"]


def test_every_chart_has_a_note_and_its_numbers(study) -> None:
    found = list(build_charts(study))
    assert [chart.key for chart in found] == KEYS
    for chart in found:
        assert chart.caption.endswith(".")
        assert chart.rows
        assert {len(row) for row in chart.rows} == {len(chart.heading)}


def test_every_colour_is_one_of_the_theme(study) -> None:
    for chart in build_charts(study):
        text = chart.figure.to_json()
        assert "var(--" in text
        assert "#" not in text


def test_attainment_shows_target_requested_rate_and_both_kinds(study) -> None:
    chart = build_attainment_chart(study)
    texts = [note.text for note in chart.figure.layout.annotations]
    assert texts == ["target 90 %", "requested 5.00 req/s"]
    assert "4M tp1 (4 GPUs)" in [trace.name for trace in chart.figure.data]


def test_a_cdf_says_the_share_within_the_target(study) -> None:
    values = study.latencies[1].ttft_ms
    share = sum(ms <= 400 for ms in values) / len(values)
    assert (
        f"4M tp1 meets 400 ms for {format_percent(share)} of requests"
        in build_cdf_chart(study, "ttft").caption
    )


def test_stage_shares_add_up_to_one(study) -> None:
    chart = build_stages_chart(study)
    assert [trace.name for trace in chart.figure.data] == [str(stage) for stage in LatencyStage]
    for shares in zip(*(trace.x for trace in chart.figure.data), strict=True):
        assert sum(shares) == pytest.approx(1)
