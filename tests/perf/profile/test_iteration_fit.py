"""Measured passes as timings."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.perf.estimate import LatencySource
from cleave.perf.profile import iteration_fit
from cleave.perf.profile.profile import DecodePoint, MeasuredProfile, PrefillPoint

from tests.support import measured_profiles, splitwise_runs

TRUTH = measured_profiles.TRUTH


def test_points_without_noise_recover_the_coefficients() -> None:
    timing = iteration_fit.to_timing(measured_profiles.from_fit())
    for prompts in ([64], [700], [2048], [512, 512], [300] * 4):
        assert timing.predict_prefill_ms(prompts) == pytest.approx(
            TRUTH.predict_prefill_ms(prompts), rel=1e-3
        )
    for batch, context in ((1, 64), (3, 900), (48, 20_000), (64, 65_536)):
        assert timing.predict_decode_ms(batch, context) == pytest.approx(
            TRUTH.predict_decode_ms(batch, context), rel=1e-6
        )


def test_batches_separate_the_attention_of_prompts_from_their_linear_layers() -> None:
    timing = iteration_fit.to_timing(measured_profiles.from_fit())
    assert timing.prompt_square_ms == pytest.approx(TRUTH.prompt_square_ms, rel=1e-3)


def test_without_batches_the_curvature_does() -> None:
    singles = tuple(point for point in measured_profiles.from_fit().prefill if point.prompts == 1)
    timing = iteration_fit.to_timing(measured_profiles.from_fit(prefill=singles))
    assert timing.prompt_square_ms == pytest.approx(TRUTH.prompt_square_ms, rel=1e-3)


def test_noise_of_two_percent_leaves_an_error_of_about_as_much() -> None:
    noisy = measured_profiles.from_fit(0.02)
    trust = iteration_fit.assess_confidence(noisy)
    assert trust.kind is LatencySource.MEASURED
    assert trust.source == "vllm on A100-SXM-80GB, measured 2026-11-21"
    assert trust.error == pytest.approx(0.02, abs=0.012)


def test_the_error_is_that_of_the_worst_part() -> None:
    whole = measured_profiles.from_fit()
    off = replace(whole, mixed=(replace(whole.mixed[0], ms=whole.mixed[0].ms * 2),))
    assert iteration_fit.compute_validation_errors(off).mixed == pytest.approx(0.5, abs=0.01)
    assert iteration_fit.assess_confidence(off).error == pytest.approx(0.5, abs=0.01)


def test_two_points_have_no_error() -> None:
    few = measured_profiles.from_fit(
        prefill=(PrefillPoint(tokens=1, ms=1.0), PrefillPoint(tokens=100, ms=2.0)),
        decode=(
            DecodePoint(batch=1, context_tokens=10, ms=1.0),
            DecodePoint(batch=8, context_tokens=10, ms=2.0),
        ),
        mixed=(),
    )
    assert iteration_fit.assess_confidence(few).error is None
    assert iteration_fit.to_timing(few).predict_prefill_ms([50]) == pytest.approx(
        1 + 49 / 99, rel=1e-6
    )


def test_a_profile_of_one_batch_is_a_line_over_its_contexts() -> None:
    points = tuple(DecodePoint(batch=4, context_tokens=c, ms=2 + c / 100) for c in (0, 100, 500))
    timing = iteration_fit.to_timing(measured_profiles.from_fit(decode=points))
    assert timing.predict_decode_ms(4, 300) == pytest.approx(5.0)
    assert timing.predict_decode_ms(1, 300) == pytest.approx(5.0)


def test_each_batch_has_its_own_slope_where_that_predicts_better() -> None:
    points = tuple(
        DecodePoint(batch=b, context_tokens=b * c, ms=10 + b * c / (100 * b))
        for b in (1, 4, 16)
        for c in (100, 200, 400, 800)
    )
    timing = iteration_fit.to_timing(measured_profiles.from_fit(decode=points))
    assert timing.decode_context_ms[1] == pytest.approx(1 / 100)
    assert timing.decode_context_ms[16] == pytest.approx(1 / 1600)


def test_stages_that_were_measured_keep_their_hops_inside() -> None:
    timing = iteration_fit.to_timing(measured_profiles.from_fit(pipeline_parallel_size=2))
    assert (timing.stages, timing.hop_ms) == (2, 0.0)
    assert timing.predict_prefill_ms([512]) == pytest.approx(
        TRUTH.predict_prefill_ms([512]), rel=1e-6
    )


@st.composite
def any_profile(draw: st.DrawFn) -> MeasuredProfile:
    ms = st.floats(0.01, 1e4)
    tokens = draw(st.sets(st.integers(1, 20_000), min_size=2, max_size=12))
    places = draw(
        st.sets(st.tuples(st.integers(1, 300), st.integers(0, 10**6)), min_size=2, max_size=20)
    )
    return measured_profiles.from_fit(
        prefill=tuple(PrefillPoint(tokens=n, ms=draw(ms)) for n in sorted(tokens)),
        decode=tuple(
            DecodePoint(batch=b, context_tokens=c, ms=draw(ms)) for b, c in sorted(places)
        ),
        mixed=(),
    )


@given(any_profile(), st.integers(1, 40_000), st.integers(1, 600))
def test_larger_passes_are_never_faster_under_any_measurement(
    found: MeasuredProfile, tokens: int, batch: int
) -> None:
    timing = iteration_fit.to_timing(found)
    assert (
        0
        <= timing.predict_prefill_ms([tokens])
        <= timing.predict_prefill_ms([tokens + 100]) * (1 + 1e-9)
    )
    once, later = (timing.predict_decode_ms(batch, context) for context in (0, 10_000))
    assert 0 <= once <= later * (1 + 1e-9)
    assert once <= timing.predict_decode_ms(batch + 50, 0) * (1 + 1e-9)
    iteration_fit.assess_confidence(found)


@pytest.mark.parametrize("key", splitwise_runs.list_profiles())
def test_decode_of_every_run_of_splitwise_is_predicted_within_five_percent(
    key: tuple[str, str, int],
) -> None:
    found = splitwise_runs.find_profile(*key)
    assert found is not None
    errors = iteration_fit.compute_validation_errors(found)
    assert errors.decode is not None
    assert errors.decode < 0.05
    # A100s have prompts that take longer in a batch than alone, which no sum of tokens explains.
    assert errors.prefill is not None
    assert errors.prefill < (0.05 if key[1].startswith("H100") else 0.20)


def test_single_prompts_of_splitwise_come_back_as_published() -> None:
    found = splitwise_runs.find_profile("llama-2-70b", "H100-SXM-80GB", 8)
    assert found is not None
    timing = iteration_fit.to_timing(found)
    # Medians of splitwise-sim's perf_model.csv.
    assert timing.predict_prefill_ms([1024]) == pytest.approx(77.91, rel=0.02)
    assert timing.predict_decode_ms(32, 32 * 576) == pytest.approx(38.62, rel=0.02)
