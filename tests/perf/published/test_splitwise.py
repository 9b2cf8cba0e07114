"""Splitwise's published runs."""

import pytest

from cleave.perf.profile import iteration_fit
from cleave.perf.published import splitwise


@pytest.mark.parametrize("key", splitwise.list_profiles())
def test_every_run_is_a_profile_whose_decode_is_predicted_within_five_percent(
    key: tuple[str, str, int],
) -> None:
    found = splitwise.find_profile(*key)
    assert found is not None
    errors = iteration_fit.compute_validation_errors(found)
    assert errors.decode is not None
    assert errors.decode < 0.05
    # A100s have prompts that take longer in a batch than alone, which no sum of tokens explains.
    assert errors.prefill is not None
    assert errors.prefill < (0.05 if key[1].startswith("H100") else 0.20)


def test_single_prompts_come_back_as_published() -> None:
    found = splitwise.find_profile("llama-2-70b", "H100-SXM-80GB", 8)
    assert found is not None
    timing = iteration_fit.to_timing(found)
    # Medians of splitwise-sim's perf_model.csv.
    assert timing.predict_prefill_ms([1024]) == pytest.approx(77.91, rel=0.02)
    assert timing.predict_decode_ms(32, 32 * 576) == pytest.approx(38.62, rel=0.02)


def test_batches_of_64_are_missing_where_they_did_not_fit() -> None:
    sizes = {
        tensor: max(point.batch for point in found.decode)
        for tensor in (2, 4, 8)
        if (found := splitwise.find_profile("llama-2-70b", "A100-SXM-80GB", tensor)) is not None
    }
    assert sizes == {2: 32, 4: 64, 8: 64}


def test_what_was_not_published_is_not_there() -> None:
    assert splitwise.find_profile("llama-2-70b", "H200-SXM-141GB", 8) is None
