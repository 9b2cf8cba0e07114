"""Whether a prompt's beginning is pulled from another instance's cache."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.policy.prefix_pull import predict_saved_ms

TIMES = st.floats(0.0, 10.0)
TOKENS = st.floats(0.0, 1e6)


@pytest.mark.parametrize(
    ("here", "there", "latency_ms", "link_token_ms", "saved_ms"),
    [
        (0.0, 1_000.0, 5.0, 0.02, 75.0),
        (900.0, 1_000.0, 5.0, 0.02, 3.0),
        (950.0, 1_000.0, 5.0, 0.02, 0.0),
        (0.0, 1_000.0, 5.0, 0.2, 0.0),
        (1_000.0, 900.0, 0.0, 0.02, 0.0),
    ],
    ids=["new here", "nearly all here", "latency", "slow link", "more here"],
)
def test_a_pull_saves_the_computation_less_its_own_time(
    here: float, there: float, latency_ms: float, link_token_ms: float, saved_ms: float
) -> None:
    saved = predict_saved_ms(here, there, 0.1, latency_ms, link_token_ms)
    assert saved == pytest.approx(saved_ms)


@given(TOKENS, TOKENS, TIMES, TIMES, TIMES)
def test_a_prompt_never_costs_more_where_more_of_it_is_cached(
    here: float, there: float, token_ms: float, latency_ms: float, link_token_ms: float
) -> None:
    """What `policy.prompt_cost` relies on to end its search."""
    total = 2e6

    def cost(cached: float) -> float:
        saved = predict_saved_ms(cached, there, token_ms, latency_ms, link_token_ms)
        return (total - cached) * token_ms - saved

    assert cost(here + 100.0) <= cost(here) + 1e-6 * total
