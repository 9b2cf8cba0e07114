"""Attention of whole iterations from LLMServingSim's tables, for the tests' slow simulator.

Written after the first comparison, to find its causes. What Cleave's iteration times leave out:
decoding requests cost more beside a prompt than alone (one kernel serves both), and more with
uneven contexts than with equal ones.
"""

import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cleave.perf.timing import PromptChunk
from cleave.simulator.fleet import SimulatedFleet
from cleave.simulator.trace import Trace

sys.path.append(str(Path(__file__).parents[2]))

from tests.support.reference_simulator import Reference
from tests.support.reference_simulator_state import Instance

Shape = tuple[int, int, int, int]
"""Tokens of a prompt chunk, tokens before it, decoding requests, context of each."""
LEAST: Shape = (16, 16, 1, 16)
"""The smallest in a table, besides 0."""


@dataclass(frozen=True)
class TabledAttention:
    """`ms`: by shape, of one layer. Interpolated linearly between powers of two."""

    ms: Mapping[Shape, float]
    layers: int
    unevenness: float
    """Share of the way from equal mean contexts to equal longest ones (LLMServingSim's alpha)."""

    def lengthen(
        self, timing_ms: float, chunks: Sequence[PromptChunk], contexts: Sequence[int]
    ) -> float:
        """ms of an iteration that takes `timing_ms` if its parts did not affect each other."""
        tokens, batch = sum(each.end - each.start for each in chunks), len(contexts)
        if not batch:
            return timing_ms
        mean = sum(contexts) / batch
        alone = self._find(0, 0, batch, mean)
        extra = self.unevenness * max(self._find(0, 0, batch, max(contexts)) - alone, 0.0)
        if tokens:
            before = sum((each.end - each.start) * each.start for each in chunks) / tokens
            both = self._find(tokens, before, batch, mean)
            extra += both - alone - self._find(tokens, before, 0, 0)
        return timing_ms + self.layers * extra

    def _find(self, *at: float) -> float:
        if not any(at):
            return 0.0
        corners: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
        for value, least in zip(at, LEAST, strict=True):
            low, high, share = _bracket(value and max(value, least))
            corners = [
                (weight * part, (*key, edge))
                for weight, key in corners
                for part, edge in ((1 - share, low), (share, high))
                if part
            ]
        known = [(weight, self.ms[key]) for weight, key in corners if key in self.ms]
        return sum(weight * ms for weight, ms in known) / sum(weight for weight, _ in known)


def _bracket(value: float) -> tuple[int, int, float]:
    """The powers of two around a size, and the share of the upper one; 0 is itself."""
    if value == 0:
        return 0, 0, 0.0
    powers = [1 << n for n in range(15)]
    low = powers[min(max(bisect_right(powers, value) - 1, 0), len(powers) - 2)]
    return low, 2 * low, max(value - low, 0.0) / low


class TabledReference(Reference):
    """The slow simulator with `attention` added to every iteration."""

    def __init__(self, fleet: SimulatedFleet, trace: Trace, attention: TabledAttention) -> None:
        super().__init__(fleet, trace)
        self.attention = attention

    def predict_ms(self, i: Instance, contexts: list[int]) -> float:
        """As the reference does, with what it leaves out."""
        return self.attention.lengthen(super().predict_ms(i, contexts), self.chunks, contexts)
