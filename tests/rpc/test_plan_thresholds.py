"""Thresholds of a plan as labels."""

import pytest

from cleave.rpc.plan_thresholds import OVERLAP_MIN, SHORT_PROMPT, PlanThresholds, parse_thresholds


@pytest.mark.parametrize("tokens", [(0, 0), (256, 0), (8, 512)])
def test_what_is_written_is_read(tokens: tuple[int, int]) -> None:
    thresholds = PlanThresholds(*tokens)
    assert parse_thresholds(thresholds.to_labels()) == thresholds


def test_a_plan_without_thresholds_has_no_labels() -> None:
    assert PlanThresholds().to_labels() == {}
    assert PlanThresholds(ahead_from_tokens=512).to_labels() == {OVERLAP_MIN: "512"}


@pytest.mark.parametrize("text", ["", "many", "-1", "1e3", "\u0663", "1234567890"])
def test_a_label_that_is_no_number_is_ignored_and_named(text: str, caplog) -> None:
    assert parse_thresholds({SHORT_PROMPT: text, OVERLAP_MIN: "512"}) == PlanThresholds(0, 512)
    assert f"label {SHORT_PROMPT}: {text!r}" in caplog.text
