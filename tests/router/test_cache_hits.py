"""Predicted and real shares of cached prompt tokens."""

import pytest

from cleave.policy.prefix_cache import compute_trust
from cleave.router.cache_hits import WINDOW_S, HitCounts, HitWindow


def test_shares_are_those_of_the_last_minutes() -> None:
    window = HitWindow()
    window.update(HitCounts(0.0, 1_000, 900, 2_000, 0))
    assert (window.predicted_share, window.engine_share) == (None, None)
    for step in range(1, 400):
        at_s = step * 0.5
        window.update(HitCounts(at_s, 1_000 + 100 * step, 900 + 25 * step, 2_000, 50 * step))
        assert window.predicted_share == pytest.approx(0.25)
    assert window.engine_share is None, "it looks nothing up"


def test_old_counts_are_dropped() -> None:
    window = HitWindow()
    for step in range(2_000):
        window.update(HitCounts(step * 0.5, 10 * step, 10 * min(step, 1_000)))
    assert window.predicted_share == 0
    assert len(window._counts) <= WINDOW_S / 20 + 3


@pytest.mark.parametrize(
    ("counts", "trust"),
    [
        ((100_000, 80_000, 100_000, 80_000), 1.0),
        ((100_000, 80_000, 100_000, 71_000), 1.0),  # chance
        ((100_000, 80_000, 100_000, 95_000), 1.0),
        ((100_000, 80_000, 100_000, 40_000), 0.5),
        ((100_000, 80_000, 50_000, 0), 0.0),
        ((100_000, 80_000, 0, 0), 0.0),  # without prefix cache
        ((10_000, 9_000, 10_000, 0), 1.0),  # too few
        ((0, 0, 0, 0), 1.0),
    ],
)
def test_predictions_are_corrected_by_what_engines_report(counts, trust: float) -> None:
    assert compute_trust(*counts) == pytest.approx(trust)
