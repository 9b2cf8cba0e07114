"""How long one pass of an instance takes: the one numeric form that every latency model ends in.

A fit, a roofline and a measured profile all become a `Timing`; the emulated engine and the
simulator compute with nothing else, so they cannot disagree. What is hard: a pass holds prompt
chunks, decoding requests or both, and has to be cheap to evaluate a million times a second;
`pass_ms` is therefore plain arithmetic over sequences of floats that numba compiles as it stands.
Standard library only: 64 emulated engines import it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Chunk(NamedTuple):
    """Prompt tokens `start` <= position < `end` of one request, computed in one pass."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Timing:
    """The passes of one instance, in milliseconds."""

    prompt_step: float
    """Tokens between two points of `prompt_ms`."""
    prompt_ms: tuple[float, ...]
    """Pass of 0, 1, 2, ... steps of prompt tokens without their attention; at least two points.
    Straight lines between the points and on from the last two. The first is the fixed cost."""
    prompt_square_ms: float
    """Attention of a prompt chunk, per token^2 of end^2 - start^2 (a whole prompt: length^2)."""
    decode_ms: tuple[float, ...]
    """Pass of 0, 1, 2, ... decoding requests without their contexts; at least two points, straight
    on from the last two."""
    decode_context_ms: tuple[float, ...]
    """Attention of decoding, per token of all contexts, by batch as in `decode_ms`; the last one
    holds for all larger batches."""
    stages: int = 1
    """Pipeline stages that share a pass equally; a pass takes the time of all of them."""
    hop_ms: float = 0.0
    """Fixed cost of handing activations to the next stage."""
    hop_token_ms: float = 0.0
    """The same per token in the pass."""

    def iteration_ms(self, chunks: Sequence[Chunk], batch: int, context_tokens: int) -> float:
        """Prompt chunks and one token for each of `batch` requests in one pass; 0 when empty.

        `context_tokens` is the sum of the decoding requests' contexts.
        """
        tokens = sum(end - start for start, end in chunks)
        squares = sum(end * end - start * start for start, end in chunks)
        hops_ms = (self.stages - 1) * (self.hop_ms + self.hop_token_ms * (tokens + batch))
        ms = pass_ms(
            self.prompt_step,
            self.prompt_ms,
            self.prompt_square_ms,
            self.decode_ms,
            self.decode_context_ms,
            tokens,
            squares,
            batch,
            context_tokens,
        )
        return ms + hops_ms if ms else 0.0

    def prefill_ms(self, prompt_tokens: Sequence[int]) -> float:
        """Whole prompts of these lengths in one pass; 0 for none."""
        return self.iteration_ms([Chunk(0, tokens) for tokens in prompt_tokens], 0, 0)

    def decode_pass_ms(self, batch: int, context_tokens: int) -> float:
        """One token for each of `batch` requests whose contexts sum to `context_tokens`."""
        return self.iteration_ms([], batch, context_tokens)


def pass_ms(
    prompt_step: float,
    prompt_ms: Sequence[float],
    prompt_square_ms: float,
    decode_ms: Sequence[float],
    decode_context_ms: Sequence[float],
    tokens: float,
    squares: float,
    batch: int,
    context_tokens: float,
) -> float:
    """`tokens` of prompts (`squares`: end^2 - start^2 summed) and `batch` decoding requests.

    A mixed pass is a decode pass whose linear layers grow from `batch` to `batch + tokens` rows:
    the weights are read once (Sarathi-Serve's piggybacking; Vidur, section 4.3: token-level
    operators depend on the tokens of the pass alone). It is never cheaper than its prompts alone.
    """
    if batch == 0:
        if tokens == 0:
            return 0.0
        return line(prompt_step, prompt_ms, tokens) + prompt_square_ms * squares
    last = min(batch, len(decode_context_ms) - 1)
    decode = line(1.0, decode_ms, batch) + decode_context_ms[last] * context_tokens
    if tokens == 0:
        return decode
    grown = line(prompt_step, prompt_ms, tokens + batch) - line(prompt_step, prompt_ms, batch)
    alone = line(prompt_step, prompt_ms, tokens)
    return max(decode + grown, alone) + prompt_square_ms * squares


def line(step: float, points: Sequence[float], at: float) -> float:
    """The straight lines through `points`, which are `step` apart from 0 on, read at `at` >= 0."""
    place = at / step
    index = min(int(place), len(points) - 2)
    return points[index] + (points[index + 1] - points[index]) * (place - index)
