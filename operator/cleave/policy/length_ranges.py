"""Predicts output lengths by a small classifier of length ranges. Called by the router.

A decision tree, trained on features known at arrival (`traffic.length_training`). What is hard: it
runs for every request, so it uses only lists and comparisons.

Source: TetriInfer, section 3.3.2, whose classifier is a language model of 125M parameters that
reads the prompt. A gateway stores no prompts; this classifier uses two numbers.
"""

from typing import NamedTuple

PROMPT_TOKENS = 0
"""Feature number: the estimated prompt tokens of the request."""
OUTPUT_LIMIT = 1
"""Feature number: the limit of output tokens; 0: none."""


class TreeNodes(NamedTuple):
    """A tree as lists over its nodes; node 0 is the root. Children come after their parents."""

    features: list[int]
    """The feature that the node compares."""
    thresholds: list[float]
    """A request with at most this value goes to `below`, else to `above`."""
    below: list[int]
    """0: the node is a leaf."""
    above: list[int]
    tokens: list[float]
    """Mean output of the training requests that reached the node."""


class RangeTree:
    """Predicts the mean output of the leaf that a request reaches; implements `LengthPredictor`.

    The mean and not the most likely range, because dispatch sums predictions and errors of means
    cancel out.
    """

    def __init__(self, nodes: TreeNodes) -> None:
        self._features, self._thresholds, self._below, self._above, self._tokens = nodes

    def predict(self, prompt_tokens: int, limit: int = 0) -> float:
        """Output tokens of a request; `limit`: its limit of output tokens, 0: none."""
        mean = self._tokens[self.find_leaf(prompt_tokens, limit)]
        return mean if limit == 0 or mean < limit else limit

    def find_leaf(self, prompt_tokens: int, limit: int = 0) -> int:
        """Index of the leaf that a request reaches."""
        at = 0
        while below := self._below[at]:
            value = prompt_tokens if self._features[at] == PROMPT_TOKENS else limit
            at = below if value <= self._thresholds[at] else self._above[at]
        return at

    def observe(self, prompt_tokens: int, output_tokens: int) -> None:
        """Does nothing: the tree is trained offline."""
