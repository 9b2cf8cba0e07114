"""Passes corrected by what was measured."""

import pytest

from cleave.perf.latency_correction import (
    NO_CORRECTION,
    CorrectedEstimator,
    Correction,
    apply_correction,
)
from cleave.perf.timing import PromptChunk

from tests.support.known_problems import Fits


@pytest.fixture
def fits() -> Fits:
    return Fits()


def test_each_phase_has_a_factor_of_its_own(fits: Fits) -> None:
    plain = fits.estimate("A100", 1, 1)
    mended = apply_correction(fits, Correction(1.5, 2.0, 400)).estimate("A100", 1, 1)
    assert plain
    assert mended
    assert mended.timing.predict_prefill_ms([700, 90]) == pytest.approx(
        1.5 * plain.timing.predict_prefill_ms([700, 90])
    )
    assert mended.timing.predict_decode_ms(40, 9_000) == pytest.approx(
        2 * plain.timing.predict_decode_ms(40, 9_000)
    )
    both = [
        each.timing.predict_iteration_ms([PromptChunk(0, 500)], 40, 9_000)
        for each in (plain, mended)
    ]
    assert 1.5 <= both[1] / both[0] <= 2
    assert mended.kv_capacity_tokens == plain.kv_capacity_tokens


def test_it_is_said_with_how_far_times_are_trusted(fits: Fits) -> None:
    mended = apply_correction(fits, Correction(1.9, 1.0, 4_200)).estimate("A100", 1, 1)
    assert mended
    source = (
        "DistServe's coefficients; corrected by x1.90 prefill, x1.00 decode from 4,200 requests"
    )
    assert mended.confidence.source == source


def test_without_a_correction_nothing_is_wrapped(fits: Fits) -> None:
    assert apply_correction(fits, NO_CORRECTION) is fits
    assert isinstance(apply_correction(fits, Correction(1.1)), CorrectedEstimator)


def test_what_does_not_fit_still_does_not(fits: Fits) -> None:
    mended = apply_correction(fits, Correction(2.0, 2.0))
    assert mended.estimate("A100", 3, 1) is None
    assert mended.explain_unsupported("A100", 3, 1) == fits.explain_unsupported("A100", 3, 1)


@pytest.mark.parametrize("factor", [0.0, -1.0, 11.0, float("nan"), float("inf")])
def test_a_factor_of_something_else_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match=r"decode .*: must be from 0.1 to 10"):
        Correction(decode=factor)


def test_passes_are_lengthened_as_far_as_a_correction_goes() -> None:
    assert Correction(1.5, 8.0, 40).scale(2.0) == Correction(3.0, 10.0, 40)
    assert Correction(0.15, 1.0).scale(0.5) == Correction(0.1, 0.5)
