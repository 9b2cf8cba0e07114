"""How long one iteration of an instance takes: the common numeric form of all latency models.

A fit, a roofline and a measured profile all become an `EngineTiming`; the emulated engine and the
simulator use only it, so they always agree. What is hard: an iteration contains
prompt chunks, decoding requests or both, and must be evaluated up to a million times a second;
`compute_iteration_ms` is therefore plain arithmetic over sequences of floats, which numba compiles
unchanged. Standard library only: 64 emulated engines import it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class PromptChunk(NamedTuple):
    """Prompt tokens `start` <= position < `end` of one request, computed in one iteration."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class EngineTiming:
    """The iteration times of one instance, in milliseconds."""

    prompt_step: float
    """Tokens between two points of `prompt_ms`."""
    prompt_ms: tuple[float, ...]
    """Iteration with 0, 1, 2, ... steps of prompt tokens, without attention; at least two points.
    Interpolated linearly, extrapolated from the last two points. The first is the fixed cost."""
    prompt_square_ms: float
    """Attention of a prompt chunk, per token^2 of end^2 - start^2 (of a full prompt: length^2)."""
    decode_ms: tuple[float, ...]
    """Iteration with 0, 1, 2, ... decoding requests, without their contexts; at least two points,
    extrapolated from the last two."""
    decode_context_ms: tuple[float, ...]
    """Attention of decoding, per token of all contexts, by batch as in `decode_ms`; the last entry
    holds for all larger batches."""
    stages: int = 1
    """Pipeline stages that share an iteration equally; the times above are sums over all stages."""
    hop_ms: float = 0.0
    """Fixed cost of sending activations to the next stage."""
    hop_token_ms: float = 0.0
    """Cost of the same per token in the iteration."""
    schedules_ahead: bool = False
    """Whether the engine schedules an iteration when the one before it starts (vLLM's asynchronous
    scheduling), so that a request joins the next but one, for which also the blocks and the seat of
    one that ends are free. The simulator models it for one stage and vLLM's batching."""
    mixed_context_ms: tuple[float, ...] = ()
    """`decode_context_ms` in iterations that also have prompt tokens; empty: the same."""

    def predict_iteration_ms(
        self, chunks: Sequence[PromptChunk], batch: int, context_tokens: int
    ) -> float:
        """ms of an iteration with prompt chunks and `batch` decoding requests; 0 when empty.
        `context_tokens` is the sum of the decoding requests' contexts."""
        tokens = sum(end - start for start, end in chunks)
        squares = sum(end * end - start * start for start, end in chunks)
        hops_ms = (self.stages - 1) * (self.hop_ms + self.hop_token_ms * (tokens + batch))
        ms = compute_iteration_ms(
            self.prompt_step,
            self.prompt_ms,
            self.prompt_square_ms,
            self.decode_ms,
            self.decode_context_ms,
            self.mixed_context_ms or self.decode_context_ms,
            tokens,
            squares,
            batch,
            context_tokens,
        )
        return ms + hops_ms if ms else 0.0

    def predict_prefill_ms(self, prompt_tokens: Sequence[int]) -> float:
        """ms of an iteration with unchunked prompts of these lengths; 0 for none."""
        return self.predict_iteration_ms([PromptChunk(0, tokens) for tokens in prompt_tokens], 0, 0)

    def predict_decode_ms(self, batch: int, context_tokens: int) -> float:
        """ms of a decode iteration of `batch` requests whose contexts sum to `context_tokens`."""
        return self.predict_iteration_ms([], batch, context_tokens)


def compute_iteration_ms(
    prompt_step: float,
    prompt_ms: Sequence[float],
    prompt_square_ms: float,
    decode_ms: Sequence[float],
    decode_context_ms: Sequence[float],
    mixed_context_ms: Sequence[float],
    tokens: float,
    squares: float,
    batch: int,
    context_tokens: float,
) -> float:
    """ms of an iteration with `tokens` of prompts and `batch` decoding requests.

    `squares`: the sum of end^2 - start^2 over the prompt chunks. A mixed iteration is a decode
    iteration whose linear layers grow from `batch` to `batch + tokens` rows: the weights are read
    once (Sarathi-Serve's piggybacking; Vidur, section 4.3: token-level operators depend only on the
    tokens of the iteration). It is never cheaper than its prompts alone.
    """
    if batch == 0:
        if tokens == 0:
            return 0.0
        return interpolate_table(prompt_step, prompt_ms, tokens) + prompt_square_ms * squares
    decode = interpolate_table(1.0, decode_ms, batch)
    if tokens == 0:
        last = min(batch, len(decode_context_ms) - 1)
        return decode + decode_context_ms[last] * context_tokens
    last = min(batch, len(mixed_context_ms) - 1)
    decode += mixed_context_ms[last] * context_tokens
    grown = interpolate_table(prompt_step, prompt_ms, tokens + batch) - interpolate_table(
        prompt_step, prompt_ms, batch
    )
    alone = interpolate_table(prompt_step, prompt_ms, tokens)
    return max(decode + grown, alone) + prompt_square_ms * squares


def interpolate_table(step: float, points: Sequence[float], at: float) -> float:
    """Linear interpolation at `at` >= 0 in a table with the points 0, `step`, 2 `step`, ..."""
    position = at / step
    index = min(int(position), len(points) - 2)
    return points[index] + (points[index + 1] - points[index]) * (position - index)
