"""Cost of resuming the streams of a lost instance: their KV is recomputed (Splitwise, IV-E).

`cleave plan --explain` prints it for a plan.
"""

from dataclasses import dataclass

from cleave.perf.timing import EngineTiming, PromptChunk


@dataclass(frozen=True, slots=True)
class ResidentLoad:
    """The mean load of a decoding instance."""

    streams: float
    prompt_tokens: float
    generated_tokens: float
    """Output tokens of a stream when the instance is lost: half of its output."""


@dataclass(frozen=True, slots=True)
class RecoveryCost:
    """Times to resume streams, without queueing and without the handoff."""

    recompute_ms: float
    """Recompute prompt and output so far of one stream of mean length."""
    prefix_cached_ms: float
    """The same if the prompt is still in the prefix cache of the instance that computed it."""
    pause_s: float
    """Time until the last stream is recomputed, shared by all instances that compute prompts."""


def compute_recovery_cost(
    timing: EngineTiming, instances: int, residents: ResidentLoad, block_tokens: int
) -> RecoveryCost:
    """Cost of losing an instance with `residents` whose contexts `instances` with `timing`
    recompute; prefix caches hold whole blocks of `block_tokens`."""
    tokens = max(round(residents.prompt_tokens + residents.generated_tokens), 1)
    cached = round(residents.prompt_tokens) // block_tokens * block_tokens
    recompute_ms = _predict_compute_ms(timing, 0, tokens)
    return RecoveryCost(
        recompute_ms,
        _predict_compute_ms(timing, cached, tokens),
        pause_s=residents.streams / instances * recompute_ms / 1e3,
    )


def _predict_compute_ms(timing: EngineTiming, start: int, end: int) -> float:
    """ms to compute the tokens from `start` to `end`, at least the last, which yields the next."""
    return timing.predict_iteration_ms([PromptChunk(min(start, end - 1), end)], 0, 0)
