"""Plans and figures in words."""

import math
from dataclasses import replace

import pytest

from cleave.api.role import Parallelism, Role
from cleave.perf.confidence import Basis, Trust
from cleave.planner.plan import PlannedPool
from cleave.planner.result.text import (
    milliseconds,
    number,
    percent,
    plan_label,
    pool_sentence,
    power,
    trust_sentence,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.01234, "0.0123"), (1.234, "1.23"), (12345.6, "12,346"), (math.inf, "-")],
)
def test_numbers_keep_three_figures(value, text) -> None:
    assert number(value) == text


def test_latencies_change_to_seconds_and_say_never() -> None:
    assert [milliseconds(ms) for ms in (0.5, 400, 1250, math.nan)] == [
        "0.500 ms",
        "400 ms",
        "1.25 s",
        "never",
    ]


def test_a_share_is_never_rounded_up_to_everything() -> None:
    assert (percent(0.99999), percent(1.0), percent(0.9)) == ("99.9 %", "100 %", "90 %")
    assert percent(0.57) == "57 %"


def test_power_changes_to_kilowatts() -> None:
    assert (power(400), power(2400)) == ("400 W", "2.4 kW")


def test_a_plan_has_a_short_label(answer) -> None:
    assert plan_label(answer.selected) == "2P tp2 + 1D tp2"


def test_a_pool_is_described_in_full() -> None:
    pool = PlannedPool(Role.PREFILL, 2, Parallelism(tensor=4, pipeline=2), "A100")
    assert pool_sentence(pool) == ("2 prefill instances, each on 8 x A100 (tensor 4, pipeline 2)")
    assert pool_sentence(PlannedPool(Role.MIXED, 1)) == "1 mixed instance on 1 x GPU"


@pytest.mark.parametrize(
    ("basis", "error", "text"),
    [
        (Basis.FITTED, 0.041, "4.1 % off on average"),
        (Basis.FITTED, None, "published, residuals not stated"),
        (Basis.MEASURED, None, "never compared with measured steps"),
    ],
)
def test_trust_tells_how_wrong_times_have_been_or_that_nobody_said(basis, error, text) -> None:
    assert trust_sentence(Trust(basis, "source", error)) == f"{basis} (source), {text}"


def test_a_label_names_the_kind_of_gpu_where_there_was_a_choice(answer) -> None:
    chosen = replace(answer.selected, is_gpu_chosen=True)
    assert plan_label(chosen) == "2P tp2 + 1D tp2 on A100-SXM-80GB"
    prefill, decode = chosen.pools
    unlike = replace(chosen, pools=(replace(prefill, gpu="H100"), decode))
    assert plan_label(unlike) == "2P tp2 on H100 + 1D tp2 on A100-SXM-80GB"
