"""Predicted and real shares of cached prompt tokens."""

import pytest

from cleave.policy.prefix_cache import bound_hit_share, compute_trust
from cleave.router.cache_hits import WINDOW_S, HitCounts, HitWindow


def test_shares_are_those_of_the_last_minutes() -> None:
    window = HitWindow()
    assert (window.predicted_share, window.engine_share) == (None, None)
    window.update(HitCounts(0.0, 1_000, 1_000, 900, 2_000, 0))
    assert (window.predicted_share, window.engine_share) == (None, None)
    for step in range(1, 400):
        sent, cached, found = 1_000 + 100 * step, 900 + 25 * step, 2_000 + 80 * step
        window.update(HitCounts(step * 0.5, sent, sent, cached, found, 40 * step))
        assert window.predicted_share == pytest.approx(0.25)
        assert window.engine_share == pytest.approx(0.5)


def test_an_engine_that_reports_no_prompts_has_no_share() -> None:
    window = HitWindow()
    for step in range(9):
        window.update(HitCounts(step * 0.5, 100 * step, 100 * step, 50 * step))
    assert window.predicted_share == 0.5
    assert window.engine_share is None


def test_without_prompts_of_this_gateway_the_engines_share_is_of_all_its_prompts() -> None:
    window = HitWindow()
    for step in range(9):
        window.update(HitCounts(step * 0.5, 0, 0, 0, 100 * step, 30 * step))
    assert window.predicted_share is None
    assert window.engine_share == pytest.approx(0.3)


def test_old_counts_are_dropped() -> None:
    window = HitWindow()
    for step in range(2_000):
        window.update(HitCounts(step * 0.5, 10 * step, 10 * step, 10 * min(step, 1_000)))
    assert window.predicted_share == 0
    assert len(window._counts) <= WINDOW_S / 20 + 3


def test_trust_follows_over_half_a_minute_and_returns() -> None:
    window = HitWindow()
    trust = []
    prompt = cached = 0
    for step in range(1_200):
        prompt += 1_000
        cached += 800 if step > 600 else 0
        window.update(HitCounts(step * 0.5, prompt, prompt, 0.8 * prompt, prompt, cached))
        trust.append(window.trust)
    assert trust[24] == 1.0
    assert trust[26] > 0.94, "the first judgment"
    assert trust[60] == pytest.approx(0.5, abs=0.2)
    assert trust[600] < 0.01
    assert trust[-1] > 0.99


@pytest.mark.parametrize(
    ("counts", "share"),
    [
        ((1_000, 1_000, 2_000, 500), 0.25),
        ((1_000, 500, 2_000, 500), 0.5),  # as if all hits were in the half that was looked up
        ((1_000, 100, 2_000, 500), 1.0),
        ((1_000, 0, 2_000, 500), 0.0),
        ((1_000, 1_000, 0, 0), 0.0),
    ],
)
def test_all_hits_of_an_engine_count_for_the_prompts_that_were_looked_up(counts, share) -> None:
    assert bound_hit_share(*counts) == share


@pytest.mark.parametrize(
    ("counts", "trust"),
    [
        ((100_000, 100_000, 80_000, 100_000, 80_000), 1.0),
        ((100_000, 100_000, 80_000, 100_000, 71_000), 1.0),  # chance
        ((100_000, 100_000, 80_000, 100_000, 95_000), 1.0),
        ((100_000, 100_000, 80_000, 100_000, 40_000), 0.5),
        ((200_000, 100_000, 80_000, 200_000, 40_000), 0.5),  # half of the prompts are short
        ((100_000, 100_000, 80_000, 50_000, 0), 0.0),
        ((100_000, 100_000, 80_000, 49_000, 0), None),  # too few reported
        ((100_000, 100_000, 80_000, 0, 0), None),
        ((20_000, 20_000, 9_000, 20_000, 0), None),  # too few
        ((0, 0, 0, 0, 0), None),
    ],
)
def test_predictions_are_corrected_by_what_engines_report(counts, trust: float | None) -> None:
    assert compute_trust(*counts) == (None if trust is None else pytest.approx(trust))
