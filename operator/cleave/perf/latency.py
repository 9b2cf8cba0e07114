"""How long one iteration of an instance takes. Used by the emulated engine and the planner.

A model answers in milliseconds for a prefill batch, a decode batch, or both at once (chunked
prefill). What is hard: the published fits describe pure batches only; `iteration_ms` says how they
are joined. This package stays light (standard library only): 64 emulated engines import it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cleave.perf import distserve


class UnknownProfileError(LookupError):
    """No latency profile of that name."""


class Chunk(NamedTuple):
    """Prompt tokens `start` <= position < `end` of one request, computed in one iteration."""

    start: int
    end: int


class LatencyModel(Protocol):
    """Time of one forward pass in milliseconds, by the contents of the batch."""

    def prefill_ms(self, prompt_tokens: Sequence[int]) -> float:
        """Whole prompts of these lengths in one batch."""

    def decode_ms(self, batch: int, context_tokens: int) -> float:
        """One token for each of `batch` requests whose contexts sum to `context_tokens`."""

    def iteration_ms(self, chunks: Sequence[Chunk], batch: int, context_tokens: int) -> float:
        """Prompt chunks and one token for each of `batch` requests in one pass; 0 when empty."""


@dataclass(frozen=True, slots=True)
class FittedLatency:
    """DistServe's fit (OSDI'24, section 4.1 and appendix A), coefficients as published.

    prefill ms = a + b * sum(len) + c * sum(len^2); decode ms = a + b * sum(context) + c * batch.
    """

    fit: distserve.Fit

    def prefill_ms(self, prompt_tokens: Sequence[int]) -> float:
        """Whole prompts of these lengths in one batch; 0 for none."""
        return self.iteration_ms([Chunk(0, tokens) for tokens in prompt_tokens], 0, 0)

    def decode_ms(self, batch: int, context_tokens: int) -> float:
        """One token for each of `batch` requests; 0 for none."""
        if not batch:
            return 0.0
        fit = self._decode_fit(batch)
        return fit.fixed_ms + fit.per_token_ms * context_tokens + fit.last_ms * batch

    def iteration_ms(self, chunks: Sequence[Chunk], batch: int, context_tokens: int) -> float:
        """A mixed pass: the larger fixed cost once, the growing parts of both added.

        The fixed part is mostly reading the weights, which a mixed pass does once. A chunk costs
        the attention of its own rows, end^2 - start^2, so that the chunks of a prompt sum to the
        prompt. With one part empty this is exactly the published fit.
        """
        decode_ms = self.decode_ms(batch, context_tokens)
        if not chunks:
            return decode_ms
        prefill = self.fit.prefill
        growing_ms = sum(
            (end - start) * (prefill.per_token_ms + prefill.last_ms * (end + start))
            for start, end in chunks
        )
        if not batch:
            return prefill.fixed_ms + growing_ms
        fixed_ms = self._decode_fit(batch).fixed_ms
        return max(prefill.fixed_ms, fixed_ms) + growing_ms + decode_ms - fixed_ms

    def _decode_fit(self, batch: int) -> distserve.Affine:
        small = batch < distserve.DECODE_REGIME
        return self.fit.decode_small if small else self.fit.decode_large


@dataclass(frozen=True, slots=True)
class Profile:
    """A named, measured instance: one engine, model and parallelism on one kind of GPU."""

    name: str
    model: str
    latency: FittedLatency
    kv_capacity_tokens: int


def load(name: str) -> Profile:
    """The profile ENGINE/MODEL/tpN. Raises UnknownProfileError, which lists the names there are."""
    fit = distserve.FITS.get(name)
    if fit is None:
        raise UnknownProfileError(f"no latency profile {name!r}; there are: {', '.join(names())}")
    _, model, parallelism = name.split("/")
    tensor_parallel_size = int(parallelism.removeprefix("tp"))
    capacity = distserve.KV_CAPACITY_TOKENS[model][tensor_parallel_size, 1]
    return Profile(name, model, FittedLatency(fit), capacity)


def names() -> tuple[str, ...]:
    """Every profile that `load` knows."""
    return tuple(distserve.FITS)
