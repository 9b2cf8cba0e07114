"""Plans and figures in words."""

import math
from dataclasses import replace

import pytest

from cleave.api.deployment import Slo
from cleave.api.role import Parallelism, Role
from cleave.perf import known_errors
from cleave.perf.estimate import Confidence, LatencySource
from cleave.planner.plan import PlannedPool
from cleave.planner.result.text import (
    describe_pool,
    describe_trust,
    format_ms,
    format_number,
    format_percent,
    format_plan,
    format_pool,
    format_power,
    format_targets,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.01234, "0.0123"), (1.234, "1.23"), (12345.6, "12,346"), (math.inf, "-")],
)
def test_numbers_keep_three_figures(value, text) -> None:
    assert format_number(value) == text


def test_latencies_change_to_seconds_and_say_never() -> None:
    assert [format_ms(ms) for ms in (0.5, 400, 1250, math.nan)] == [
        "0.500 ms",
        "400 ms",
        "1.25 s",
        "never",
    ]


def test_a_target_with_a_share_of_its_own_is_named_as_a_percentile() -> None:
    slo = Slo(ttft_ms=400, tpot_ms=40, tpot_attainment=0.99)
    assert format_targets(slo) == "TTFT 400 ms and TPOT P99 40.0 ms"
    every = slo.model_copy(update={"ttft_attainment": 0.999, "itl_p99_ms": 60})
    assert format_targets(every) == "TTFT P99.9 400 ms, TPOT P99 40.0 ms and ITL P99 60.0 ms"


def test_a_share_is_never_rounded_up_to_everything() -> None:
    assert (format_percent(0.99999), format_percent(1.0), format_percent(0.9)) == (
        "99.9 %",
        "100 %",
        "90 %",
    )
    assert format_percent(0.57) == "57 %"


def test_power_changes_to_kilowatts() -> None:
    assert (format_power(400), format_power(2400)) == ("400 W", "2.4 kW")


def test_a_plan_has_a_short_label(answer) -> None:
    assert format_plan(answer.selected) == "2P tp2 + 1D tp2"


def test_a_pool_is_described_in_full() -> None:
    pool = PlannedPool(Role.PREFILL, 2, Parallelism(tensor=4, pipeline=2), "A100")
    assert describe_pool(pool) == ("2 prefill instances, each on 8 x A100 (tensor 4, pipeline 2)")
    assert describe_pool(PlannedPool(Role.MIXED, 1)) == "1 mixed instance on 1 x GPU"
    ranks = PlannedPool(Role.DECODE, 1, Parallelism(data=8, expert=True), "H200")
    assert describe_pool(ranks) == "1 decode instance on 8 x H200 (data 8, experts distributed)"
    assert format_pool(ranks) == "1D tp1 dp8 ep"


@pytest.mark.parametrize(
    ("basis", "error", "text"),
    [
        (LatencySource.MEASURED, 0.041, "iterations 4.1 % off on average"),
        (LatencySource.MEASURED, None, "never compared with measurements"),
    ],
)
def test_trust_shows_the_error_of_the_times_or_that_it_is_unknown(basis, error, text) -> None:
    assert describe_trust(Confidence(basis, "source", error)) == f"{basis}, {text}; source"


def test_trust_in_short_is_what_published_runs_showed_and_fits_a_terminal() -> None:
    errors = known_errors.KERNELS["H200-SXM-141GB"]
    trust = Confidence(LatencySource.KERNELS, "source", None, errors)
    text = describe_trust(trust, is_short=True)
    assert text == "kernels, TPOT 4 % off (P90 13 %), TTFT 5 % (P90 11 %)"
    assert len(f"TRUST: {text}") <= 80
    unknown = Confidence(LatencySource.KERNELS, "source", None, errors._replace(ttft=None))
    assert describe_trust(unknown).endswith("TTFT never compared; source")


def test_trust_says_that_stages_were_never_compared() -> None:
    trust = Confidence(LatencySource.KERNELS, "source", None, has_stages=True)
    text = "kernels in stages, never compared with measurements"
    assert describe_trust(trust, is_short=True) == text


def test_a_label_names_the_kind_of_gpu_where_there_was_a_choice(answer) -> None:
    chosen = replace(answer.selected, is_gpu_chosen=True)
    assert format_plan(chosen) == "2P tp2 + 1D tp2 on A100-SXM-80GB"
    prefill, decode = chosen.pools
    mixed_plan = replace(chosen, pools=(replace(prefill, gpu="H100"), decode))
    assert format_plan(mixed_plan) == "2P tp2 on H100 + 1D tp2 on A100-SXM-80GB"
