"""What going on with a lost instance's streams costs, and whether checkpoints of their KV pay.

Splitwise (section IV-E) names two ways: compute anew, or restore KV that was copied to memory which
outlives the engine. `cleave plan --explain` tells both for a plan. What is hard: the two are paid
in different coin. Computing costs GPU time when an instance is lost; checkpoints cost memory
bandwidth all the time. Both are counted in seconds of GPUs, so that a rate of losses decides.
"""

from dataclasses import dataclass

from cleave.perf.link import Link
from cleave.perf.timing import Chunk, Timing

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Residents:
    """What a decoding instance has in hand, on average."""

    streams: float
    prompt_tokens: float
    made_tokens: float
    """By a stream until the instance is lost: half of its output."""
    begun_per_s: float

    @property
    def context_tokens(self) -> float:
        """Of one stream."""
        return self.prompt_tokens + self.made_tokens


@dataclass(frozen=True, slots=True)
class Keeping:
    """How checkpoints are kept: a block goes to the host's memory when it is full."""

    link: Link
    """One GPU's to the host's memory."""
    token_bytes: float
    """KV of one token on the busiest GPU."""
    gpus: int
    """Of the decoding instance; each copies its share."""
    block_tokens: int
    memory_gb_per_s: float
    """One GPU's own memory, which decoding waits for and copying reads as well."""


@dataclass(frozen=True, slots=True)
class Computing:
    """Who computes the contexts of lost streams."""

    timing: Timing
    gpus: int
    """Of one instance."""
    instances: int


@dataclass(frozen=True, slots=True)
class Resuming:
    """One stream's way back, without waiting for others, in ms; its hand-off is the same in all."""

    anew_ms: float
    """Prompt and tokens so far are computed."""
    returned_ms: float
    """The prompt is still in the prefix cache of who computed it."""
    restored_ms: float
    """All full blocks come from a checkpoint, the rest is computed."""


@dataclass(frozen=True, slots=True)
class Weighing:
    """Checkpoints of one decoding instance against computing anew when it is lost."""

    resuming: Resuming
    pause_s: float
    """Until the last stream is computed, shared by all who compute."""
    restored_pause_s: float
    link_bytes_per_s: float
    """Copied by each GPU, all the time."""
    link_share: float
    host_bytes: float
    """In use."""
    cost_s_per_hour: float
    """GPU seconds that copying takes from decoding."""
    gain_s: float
    """GPU seconds that one loss takes less."""

    @property
    def even_hours(self) -> float:
        """Hours between losses of an instance up to which checkpoints take less than they save."""
        return self.gain_s / self.cost_s_per_hour if self.cost_s_per_hour else 0.0

    def pays(self, hours_between_losses: float) -> bool:
        """Whether checkpoints save GPU time, if one instance is lost so often."""
        return self.link_share < 1.0 and 0.0 < hours_between_losses < self.even_hours


def resume(timing: Timing, residents: Residents, keeping: Keeping) -> Resuming:
    """What one stream of mean length costs who computes it, `timing`."""
    tokens = max(round(residents.context_tokens), 1)
    kept = tokens // keeping.block_tokens * keeping.block_tokens
    cached = round(residents.prompt_tokens) // keeping.block_tokens * keeping.block_tokens
    return Resuming(
        _compute_ms(timing, 0, tokens),
        _compute_ms(timing, cached, tokens),
        keeping.link.send_ms(kept * keeping.token_bytes) + _compute_ms(timing, kept, tokens),
    )


def weigh(computing: Computing, residents: Residents, keeping: Keeping) -> Weighing:
    """Checkpoints of every full block of prompts and outputs, until their streams end."""
    one = resume(computing.timing, residents, keeping)
    copied = residents.begun_per_s * (residents.prompt_tokens + 2 * residents.made_tokens)
    link_bytes = copied * keeping.token_bytes
    share = link_bytes / (keeping.memory_gb_per_s * 1e9)
    in_turn = residents.streams / computing.instances / 1e3
    return Weighing(
        one,
        pause_s=in_turn * one.anew_ms,
        restored_pause_s=in_turn * one.restored_ms,
        link_bytes_per_s=link_bytes,
        link_share=link_bytes / (keeping.link.effective_gb_per_s * 1e9),
        host_bytes=residents.streams
        * residents.context_tokens
        * keeping.token_bytes
        * keeping.gpus,
        cost_s_per_hour=_HOUR_S * share * keeping.gpus,
        gain_s=residents.streams * computing.gpus * (one.anew_ms - one.restored_ms) / 1e3,
    )


def _compute_ms(timing: Timing, start: int, end: int) -> float:
    """At least the last token: it makes the next one."""
    return timing.iteration_ms([Chunk(min(start, end - 1), end)], 0, 0)
