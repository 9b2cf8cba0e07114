"""How long an answer will be, by a small classifier of length ranges. Called by the router.

It is a decision tree, trained on what is known when a request comes (`traffic.length_training`).
What is hard: it is asked for every request, so it is lists and comparisons, nothing else.

Source: TetriInfer, section 3.3.2, whose classifier is a language model of 125M parameters that
reads the prompt. A gateway keeps no prompts; this one looks at two numbers.
"""

from typing import NamedTuple

PROMPT_TOKENS = 0
"""What a node compares: the request's prompt tokens, as estimated."""
LIMIT = 1
"""Or its limit of output tokens; 0: none."""


class Nodes(NamedTuple):
    """A tree; node 0 is its root. Children come behind their parents."""

    features: list[int]
    """What is compared."""
    thresholds: list[float]
    """Up to which a request goes to `below`, else to `above`."""
    below: list[int]
    """0: the node is a leaf."""
    above: list[int]
    tokens: list[float]
    """Mean output of the requests that came here in training."""


class RangeTree:
    """Foretells by the leaf that a request comes to; a `Predictor`.

    The mean of its leaf, not the likeliest range of it: dispatch adds predictions up, and errors of
    means cancel out.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._features, self._thresholds, self._below, self._above, self._tokens = nodes

    def predict(self, prompt_tokens: int, limit: int = 0) -> float:
        """Output tokens of a request; `limit`: its own, 0: none."""
        mean = self._tokens[self.find_leaf(prompt_tokens, limit)]
        return mean if limit == 0 or mean < limit else limit

    def find_leaf(self, prompt_tokens: int, limit: int = 0) -> int:
        """The node at which its way ends."""
        at = 0
        while below := self._below[at]:
            value = prompt_tokens if self._features[at] == PROMPT_TOKENS else limit
            at = below if value <= self._thresholds[at] else self._above[at]
        return at

    def learn(self, prompt_tokens: int, output_tokens: int) -> None:
        """Nothing: it stays as it was trained."""
