"""A trained tree of output lengths, queried as a router does."""

import bisect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.policy.length_ranges import OUTPUT_LIMIT, PROMPT_TOKENS, RangeTree, TreeNodes

TWO_FEATURES = TreeNodes(
    features=[PROMPT_TOKENS, 0, OUTPUT_LIMIT, 0, 0],
    thresholds=[100.5, 0, 50.5, 0, 0],
    below=[1, 0, 3, 0, 0],
    above=[2, 0, 4, 0, 0],
    tokens=[200, 20, 300, 40, 600],
)


def chain(bounds: list[int]) -> RangeTree:
    """Leaf number n foretells n tokens, for prompts from its bound up to the next one."""
    features: list[int] = []
    thresholds: list[float] = []
    below: list[int] = []
    above: list[int] = []
    tokens: list[float] = []
    for number, bound in enumerate(bounds):
        at = len(features)
        features += [PROMPT_TOKENS, PROMPT_TOKENS]
        thresholds += [bound, 0]
        below += [at + 1, 0]
        above += [at + 2, 0]
        tokens += [0, number]
    last = [PROMPT_TOKENS], [0.0], [0], [0], [float(len(bounds))]
    rows = zip((features, thresholds, below, above, tokens), last, strict=True)
    return RangeTree(TreeNodes(*([*column, *end] for column, end in rows)))


@pytest.mark.parametrize(
    ("prompt", "limit", "predicted"),
    [(100, 0, 20), (101, 0, 40), (101, 51, 51), (101, 900, 600), (100, 900, 20)],
)
def test_a_request_gets_the_mean_of_its_leaf(prompt, limit, predicted) -> None:
    assert RangeTree(TWO_FEATURES).predict(prompt, limit) == predicted


def test_a_limit_is_never_exceeded() -> None:
    assert RangeTree(TWO_FEATURES).predict(80, 7) == 7


def test_what_ends_later_changes_nothing() -> None:
    tree = RangeTree(TWO_FEATURES)
    tree.observe(100, 5_000)
    assert tree.predict(100) == 20


@given(
    st.lists(st.integers(1, 10_000), min_size=1, max_size=40, unique=True).map(sorted),
    st.integers(0, 20_000),
)
def test_every_prompt_is_found_by_its_length(bounds, prompt) -> None:
    assert chain(bounds).predict(prompt) == bisect.bisect_left(bounds, prompt)
