"""Passes corrected by what was measured."""

import pytest

from cleave.perf.latency_correction import NONE, CorrectedEstimator, Correction, correct
from cleave.perf.timing import Chunk

from tests.support.known_problems import Fits


@pytest.fixture
def fits() -> Fits:
    return Fits()


def test_each_phase_has_a_factor_of_its_own(fits: Fits) -> None:
    plain = fits.estimate("A100", 1, 1)
    mended = correct(fits, Correction(1.5, 2.0, 400)).estimate("A100", 1, 1)
    assert plain
    assert mended
    assert mended.timing.prefill_ms([700, 90]) == pytest.approx(
        1.5 * plain.timing.prefill_ms([700, 90])
    )
    assert mended.timing.decode_pass_ms(40, 9_000) == pytest.approx(
        2 * plain.timing.decode_pass_ms(40, 9_000)
    )
    both = [each.timing.iteration_ms([Chunk(0, 500)], 40, 9_000) for each in (plain, mended)]
    assert 1.5 <= both[1] / both[0] <= 2
    assert mended.kv_capacity_tokens == plain.kv_capacity_tokens


def test_it_is_said_with_how_far_times_are_trusted(fits: Fits) -> None:
    mended = correct(fits, Correction(1.9, 1.0, 4_200)).estimate("A100", 1, 1)
    assert mended
    source = (
        "DistServe's coefficients; corrected by x1.90 prefill, x1.00 decode from 4,200 requests"
    )
    assert mended.trust.source == source


def test_without_a_correction_nothing_is_wrapped(fits: Fits) -> None:
    assert correct(fits, NONE) is fits
    assert isinstance(correct(fits, Correction(1.1)), CorrectedEstimator)


def test_what_does_not_fit_still_does_not(fits: Fits) -> None:
    mended = correct(fits, Correction(2.0, 2.0))
    assert mended.estimate("A100", 3, 1) is None
    assert mended.why_not("A100", 3, 1) == fits.why_not("A100", 3, 1)


@pytest.mark.parametrize("factor", [0.0, -1.0, 11.0, float("nan"), float("inf")])
def test_a_factor_of_something_else_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match=r"decode .*: must be from 0.1 to 10"):
        Correction(decode=factor)


def test_passes_are_lengthened_as_far_as_a_correction_goes() -> None:
    assert Correction(1.5, 8.0, 40).times(2.0) == Correction(3.0, 10.0, 40)
    assert Correction(0.15, 1.0).times(0.5) == Correction(0.1, 0.5)
