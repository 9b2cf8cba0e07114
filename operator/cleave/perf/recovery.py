"""Cost of resuming the streams of a lost instance, and whether checkpoints of their KV pay off.

Splitwise (section IV-E) names two methods: recompute the KV, or restore it from a copy in memory
that outlives the engine. `cleave plan --explain` prints both for a plan. What is hard: recomputing
costs GPU time only when an instance is lost, whereas checkpoints cost memory bandwidth all the
time. Both are expressed in GPU seconds, so that the rate of losses decides.
"""

from dataclasses import dataclass

from cleave.perf.hardware.link import Link
from cleave.perf.timing import EngineTiming, PromptChunk

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class ResidentLoad:
    """The mean load of a decoding instance."""

    streams: float
    prompt_tokens: float
    generated_tokens: float
    """Output tokens of a stream when the instance is lost: half of its output."""
    started_per_s: float

    @property
    def context_tokens(self) -> float:
        """Mean context of one stream."""
        return self.prompt_tokens + self.generated_tokens


@dataclass(frozen=True, slots=True)
class CheckpointSetup:
    """How checkpoints are written: each full block is copied to the host's memory."""

    link: Link
    """From one GPU to the host's memory."""
    token_bytes: float
    """KV of one token on the busiest GPU."""
    gpus: int
    """GPUs of the decoding instance; each copies its share."""
    block_tokens: int
    memory_gb_per_s: float
    """Memory bandwidth of one GPU, which limits decoding and which copying uses, too."""


@dataclass(frozen=True, slots=True)
class RecomputeSetup:
    """The instances that recompute the contexts of lost streams."""

    timing: EngineTiming
    gpus: int
    """GPUs of one instance."""
    instances: int


@dataclass(frozen=True, slots=True)
class ResumeCost:
    """Time to resume one stream in ms, without queueing and without the handoff."""

    recompute_ms: float
    """Recompute prompt and output so far."""
    prefix_cached_ms: float
    """The same if the prompt is still in the prefix cache of the instance that computed it."""
    restored_ms: float
    """Restore all full blocks from a checkpoint and recompute the rest."""


@dataclass(frozen=True, slots=True)
class RecoveryComparison:
    """Comparison for one decoding instance: checkpoints, or recomputing when it is lost."""

    resume_cost: ResumeCost
    pause_s: float
    """Time until the last stream is recomputed, shared by all `RecomputeSetup.instances`."""
    restored_pause_s: float
    link_bytes_per_s: float
    """Bytes that each GPU copies continuously."""
    link_share: float
    host_bytes: float
    """Host memory in use."""
    cost_s_per_hour: float
    """GPU seconds that copying takes from decoding."""
    gain_s: float
    """GPU seconds that checkpoints save at one loss; negative where computing is faster."""

    @property
    def break_even_hours(self) -> float:
        """Mean hours between losses of an instance below which checkpoints save GPU time."""
        return self.gain_s / self.cost_s_per_hour if self.cost_s_per_hour else 0.0


def compute_resume_cost(
    timing: EngineTiming, residents: ResidentLoad, checkpoints: CheckpointSetup
) -> ResumeCost:
    """Times to resume one stream of mean length on an instance with `timing`."""
    tokens = max(round(residents.context_tokens), 1)
    saved = tokens // checkpoints.block_tokens * checkpoints.block_tokens
    cached = round(residents.prompt_tokens) // checkpoints.block_tokens * checkpoints.block_tokens
    return ResumeCost(
        _predict_compute_ms(timing, 0, tokens),
        _predict_compute_ms(timing, cached, tokens),
        checkpoints.link.compute_send_ms(saved * checkpoints.token_bytes)
        + _predict_compute_ms(timing, saved, tokens),
    )


def compare_recovery(
    recompute: RecomputeSetup, residents: ResidentLoad, checkpoints: CheckpointSetup
) -> RecoveryComparison:
    """Compare recomputing with checkpoints of every full block of prompts and outputs."""
    one = compute_resume_cost(recompute.timing, residents, checkpoints)
    copied = residents.started_per_s * (residents.prompt_tokens + 2 * residents.generated_tokens)
    link_bytes = copied * checkpoints.token_bytes
    share = link_bytes / (checkpoints.memory_gb_per_s * 1e9)
    streams_per_instance = residents.streams / recompute.instances / 1e3
    stored_tokens = residents.streams * residents.context_tokens
    return RecoveryComparison(
        one,
        pause_s=streams_per_instance * one.recompute_ms,
        restored_pause_s=streams_per_instance * one.restored_ms,
        link_bytes_per_s=link_bytes,
        link_share=link_bytes / (checkpoints.link.effective_gb_per_s * 1e9),
        host_bytes=stored_tokens * checkpoints.token_bytes * checkpoints.gpus,
        cost_s_per_hour=_HOUR_S * share * checkpoints.gpus,
        gain_s=residents.streams * recompute.gpus * (one.recompute_ms - one.restored_ms) / 1e3,
    )


def _predict_compute_ms(timing: EngineTiming, start: int, end: int) -> float:
    """ms to compute the tokens from `start` to `end`, at least the last, which yields the next."""
    return timing.predict_iteration_ms([PromptChunk(min(start, end - 1), end)], 0, 0)
