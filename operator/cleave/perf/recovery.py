"""Cost of resuming the streams of a lost instance, and whether checkpoints of their KV pay off.

Splitwise (section IV-E) names two methods: recompute the KV, or restore it from a copy in memory
that outlives the engine. `cleave plan --explain` prints both for a plan. What is hard: recomputing
costs GPU time only when an instance is lost, whereas checkpoints cost memory bandwidth all the
time. Both are expressed in GPU seconds, so that the rate of losses decides.
"""

from dataclasses import dataclass

from cleave.perf.hardware.link import Link
from cleave.perf.timing import Chunk, Timing

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Residents:
    """The mean load of a decoding instance."""

    streams: float
    prompt_tokens: float
    made_tokens: float
    """Output tokens of a stream when the instance is lost: half of its output."""
    begun_per_s: float

    @property
    def context_tokens(self) -> float:
        """Mean context of one stream."""
        return self.prompt_tokens + self.made_tokens


@dataclass(frozen=True, slots=True)
class Keeping:
    """How checkpoints are written: each full block is copied to the host's memory."""

    link: Link
    """From one GPU to the host's memory."""
    token_bytes: float
    """KV of one token on the busiest GPU."""
    gpus: int
    """GPUs of the decoding instance; each copies its share."""
    block_tokens: int
    memory_gb_per_s: float
    """Bandwidth of one GPU's own memory, which limits decoding and which copying uses as well."""


@dataclass(frozen=True, slots=True)
class Computing:
    """The instances that recompute the contexts of lost streams."""

    timing: Timing
    gpus: int
    """GPUs of one instance."""
    instances: int


@dataclass(frozen=True, slots=True)
class Resuming:
    """Time to resume one stream in ms, without queueing and without the handoff."""

    anew_ms: float
    """Prompt and output so far are recomputed."""
    returned_ms: float
    """The same if the prompt is still in the prefix cache of the instance that computed it."""
    restored_ms: float
    """All full blocks come from a checkpoint, the rest is recomputed."""


@dataclass(frozen=True, slots=True)
class Weighing:
    """Comparison for one decoding instance: checkpoints, or recomputing when it is lost."""

    resuming: Resuming
    pause_s: float
    """Time until the last stream is recomputed, shared by all `Computing.instances`."""
    restored_pause_s: float
    link_bytes_per_s: float
    """Bytes that each GPU copies continuously."""
    link_share: float
    host_bytes: float
    """Host memory in use."""
    cost_s_per_hour: float
    """GPU seconds that copying takes from decoding."""
    gain_s: float
    """GPU seconds that checkpoints save at one loss."""

    @property
    def even_hours(self) -> float:
        """Mean hours between losses of an instance below which checkpoints save GPU time."""
        return self.gain_s / self.cost_s_per_hour if self.cost_s_per_hour else 0.0

    def pays(self, hours_between_losses: float) -> bool:
        """Whether checkpoints save GPU time at this mean time between losses of an instance."""
        return self.link_share < 1.0 and 0.0 < hours_between_losses < self.even_hours


def resume(timing: Timing, residents: Residents, checkpoints: Keeping) -> Resuming:
    """Times to resume one stream of mean length on an instance with `timing`."""
    tokens = max(round(residents.context_tokens), 1)
    saved = tokens // checkpoints.block_tokens * checkpoints.block_tokens
    cached = round(residents.prompt_tokens) // checkpoints.block_tokens * checkpoints.block_tokens
    return Resuming(
        _compute_ms(timing, 0, tokens),
        _compute_ms(timing, cached, tokens),
        checkpoints.link.send_ms(saved * checkpoints.token_bytes)
        + _compute_ms(timing, saved, tokens),
    )


def weigh(recompute: Computing, residents: Residents, checkpoints: Keeping) -> Weighing:
    """Compare recomputing with checkpoints of every full block of prompts and outputs."""
    one = resume(recompute.timing, residents, checkpoints)
    copied = residents.begun_per_s * (residents.prompt_tokens + 2 * residents.made_tokens)
    link_bytes = copied * checkpoints.token_bytes
    share = link_bytes / (checkpoints.memory_gb_per_s * 1e9)
    streams_per_instance = residents.streams / recompute.instances / 1e3
    return Weighing(
        one,
        pause_s=streams_per_instance * one.anew_ms,
        restored_pause_s=streams_per_instance * one.restored_ms,
        link_bytes_per_s=link_bytes,
        link_share=link_bytes / (checkpoints.link.effective_gb_per_s * 1e9),
        host_bytes=residents.streams
        * residents.context_tokens
        * checkpoints.token_bytes
        * checkpoints.gpus,
        cost_s_per_hour=_HOUR_S * share * checkpoints.gpus,
        gain_s=residents.streams * recompute.gpus * (one.anew_ms - one.restored_ms) / 1e3,
    )


def _compute_ms(timing: Timing, start: int, end: int) -> float:
    """Time to compute the tokens from `start` to `end`, at least the last one, which yields the
    next token."""
    return timing.iteration_ms([Chunk(min(start, end - 1), end)], 0, 0)
