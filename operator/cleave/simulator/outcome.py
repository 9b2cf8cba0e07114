"""The result of a simulation, per request and per instance, and where requests spend their time."""

from dataclasses import dataclass
from enum import IntEnum, StrEnum

import numpy as np
from numpy.typing import NDArray

from cleave.simulator.inter_token_latency import compute_middles

Times = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class InterTokenLatencies:
    """How long tokens took to follow the previous ones of their requests: every gap by itself, as
    vLLM's `inter_token_latency` of an engine that generates one token at a time."""

    counts: Counts
    """Tokens by bin of `inter_token_latency`."""

    def compute_quantile(self, level: float) -> float:
        """The ms at or above the share `level` of tokens, within 0.8 %; 0: there are none."""
        sums = np.cumsum(self.counts)
        if not sums[-1]:
            return 0.0
        return float(compute_middles()[np.searchsorted(sums, level * sums[-1])])

    def compute_share(self, ms: float) -> float:
        """Share of tokens that took at most so long; 1: there are none."""
        total = self.counts.sum()
        return float(self.counts[compute_middles() <= ms].sum() / total) if total else 1.0

    def __add__(self, other: "InterTokenLatencies") -> "InterTokenLatencies":
        """Of both simulations together."""
        return InterTokenLatencies(self.counts + other.counts)


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Times in milliseconds since the start of the trace, one per request; nan: never reached.
    Instances are numbered in the fleet's order: prefill pools, decode pools, mixed pools."""

    arrival_ms: Times
    prefill_start_ms: Times
    """The first iteration with its prompt begins (minus arrival: the scheduling delay)."""
    prefill_end_ms: Times
    """The prompt is computed."""
    transfer_start_ms: Times
    """The pull begins; equal to prefill_end_ms on a mixed instance."""
    transfer_end_ms: Times
    decode_start_ms: Times
    """The first decode iteration begins."""
    first_token_ms: Times
    end_ms: Times
    prompt_tokens: Counts
    output_tokens: Counts
    num_preemptions: Counts
    prefill_instance: Counts
    """Instance that computed the prompt; -1: none (only decode pools, or never started)."""
    decode_instance: Counts
    """Instance that generated output tokens; -1: none. Equal to the former on mixed instances."""
    outcome: Counts
    """A `RequestOutcome` per request: whether it was served, or why not."""
    cached_tokens: Counts
    """Prompt tokens that were in the prefix cache of the instance that computed the prompt."""
    pull_cached_tokens: Counts
    """Prompt tokens that were in the decode instance's own cache, which it did not pull."""
    fetched_tokens: Counts
    """Prompt tokens that were pulled from another instance's prefix cache instead of computed."""
    loaded_tokens: Counts
    """Prompt tokens that were copied back from the host memory of the instance that computed the
    prompt."""
    source_instance: Counts
    """Where dispatch has decided that they be pulled from; -1: nowhere."""
    instances: "InstanceStatistics"
    itl: InterTokenLatencies
    """Of the tokens that came in the requested window, all by default."""
    num_flips: int = 0
    """Number of role changes of all instances."""

    @property
    def ttft_ms(self) -> Times:
        """Time to first token, including queueing."""
        return self.first_token_ms - self.arrival_ms

    @property
    def tpot_ms(self) -> Times:
        """(end - first token) / (output tokens - 1); 0 for a single token."""
        tpot: Times = (self.end_ms - self.first_token_ms) / np.maximum(self.output_tokens - 1, 1)
        return tpot

    @property
    def cached_share(self) -> float:
        """Share of all prompt tokens that were cached where the prompt was computed, on the GPU or
        in host memory."""
        cached = self.cached_tokens.sum() + self.loaded_tokens.sum()
        return float(cached / self.prompt_tokens.sum())

    def compute_attainment(self, ttft_ms: float, tpot_ms: float) -> float:
        """Share of requests that meet both targets; unfinished requests meet neither."""
        met = (self.ttft_ms <= ttft_ms) & (self.tpot_ms <= tpot_ms)
        return float(np.count_nonzero(met)) / len(met)


class RequestOutcome(IntEnum):
    """How a request ended."""

    SERVED = 0
    TOO_LONG = 1
    """Its KV does not fit on the selected instances, even when they are empty."""
    UNFINISHED = 2
    """It still waited for room when the simulation ended."""


@dataclass(frozen=True, slots=True)
class InstanceStatistics:
    """One entry per instance, over the whole simulation."""

    busy_ms: Times
    """Time with an iteration running (with pipeline stages: on the first stage)."""
    iterations: Counts
    decode_iterations: Counts
    """Iterations that contain decoding requests."""
    batch_peak: Counts
    """Largest number of requests that decoded in one iteration."""
    prompt_tokens: Counts
    """Computed prompt tokens, including recomputation."""
    decode_tokens: Counts
    kv_token_ms: Times
    """Integral of the KV tokens held over time."""
    kv_peak_tokens: Counts
    kv_final_tokens: Counts
    """KV tokens still in use at the end; 0 unless requests were unfinished."""
    num_preemptions: Counts
    duration_ms: float
    """From 0 to the last event."""

    @property
    def mean_batch(self) -> Times:
        """Mean number of decoding requests per decode iteration; nan if there was none."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self.decode_tokens / self.decode_iterations, np.float64)

    def compute_mfu(self, flops_per_token: float, peak_flops: float | Times) -> Times:
        """Model FLOPs utilisation of each instance over the simulation (Vidur, section 5.2).

        `peak_flops`: per second, all GPUs of one instance; one figure, or one per instance.
        Recomputed tokens count as work.
        """
        tokens = self.prompt_tokens + self.decode_tokens
        share = tokens * flops_per_token / (peak_flops * self.duration_ms / 1000)
        return np.asarray(share, np.float64)


def compute_quantile(times: Times, level: float) -> float:
    """The time at or above the share `level` of requests; nan (never reached) counts as infinite.
    No interpolation, which is undefined between a finite and an infinite value."""
    return float(np.quantile(np.where(np.isnan(times), np.inf, times), level, method="higher"))


class LatencyStage(StrEnum):
    """One part of a request's life, in order (DistServe, section 6.3)."""

    PREFILL_QUEUE = "prefill queueing"
    PREFILL = "prefill"
    TRANSFER = "KV transfer"
    DECODE_QUEUE = "decode queueing"
    DECODE = "decode"


def compute_stage_ms(result: SimulationResult) -> dict[LatencyStage, Times]:
    """Milliseconds of every request in each stage; nan where it never reached the stage.

    Decode queueing is the wait for room on the decode instance before the pull plus the wait for
    its first iteration after it. The five add up to the time from arrival to end. On a mixed
    instance there is no transfer, and decode includes iterations that other prompts lengthened.
    """
    return {
        LatencyStage.PREFILL_QUEUE: result.prefill_start_ms - result.arrival_ms,
        LatencyStage.PREFILL: result.prefill_end_ms - result.prefill_start_ms,
        LatencyStage.TRANSFER: result.transfer_end_ms - result.transfer_start_ms,
        LatencyStage.DECODE_QUEUE: (result.transfer_start_ms - result.prefill_end_ms)
        + (result.decode_start_ms - result.transfer_end_ms),
        LatencyStage.DECODE: result.end_ms - result.decode_start_ms,
    }


def compute_stage_shares(result: SimulationResult) -> dict[LatencyStage, float]:
    """Each stage's share of the total time of the requests that ended; zeros when none did."""
    ended = ~np.isnan(result.end_ms)
    totals = {stage: float(np.nansum(ms[ended])) for stage, ms in compute_stage_ms(result).items()}
    overall = sum(totals.values())
    return {stage: total / overall if overall else 0.0 for stage, total in totals.items()}
