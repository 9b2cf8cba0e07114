"""What a simulation says, per request and per instance."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Times in milliseconds on the trace's clock, one entry per request; nan: never reached.

    Instances are numbered prefill pools first, then decode, then mixed, as in the fleet.
    """

    arrival_ms: Times
    prefill_start_ms: Times
    """The first pass with its prompt begins (scheduling delay: minus arrival)."""
    prefill_end_ms: Times
    """The prompt is computed."""
    transfer_start_ms: Times
    """The pull begins; equal to prefill_end_ms on a mixed instance."""
    transfer_end_ms: Times
    decode_start_ms: Times
    """The first decode pass begins."""
    first_token_ms: Times
    end_ms: Times
    output_tokens: Counts
    num_preemptions: Counts
    prefill_instance: Counts
    """Where the prompt was computed; -1: nowhere (decode pools alone, or never started)."""
    decode_instance: Counts
    """Where tokens were made; -1: nowhere. On a mixed instance both are the same."""
    fate: Counts
    """A `Fate` each: why a request that never ended did not."""
    instances: "Instances"
    num_flips: int = 0
    """How often an instance changed its role."""

    @property
    def ttft_ms(self) -> Times:
        """Time to first token, queueing included."""
        return self.first_token_ms - self.arrival_ms

    @property
    def tpot_ms(self) -> Times:
        """(end - first token) / (output tokens - 1); 0 for a single token."""
        gaps = np.maximum(self.output_tokens - 1, 1)
        tpot: Times = (self.end_ms - self.first_token_ms) / gaps
        return tpot

    @property
    def normalised_latency_ms(self) -> Times:
        """(end - arrival) / output tokens (Orca; Vidur, section 7.2)."""
        latency: Times = (self.end_ms - self.arrival_ms) / self.output_tokens
        return latency

    def attainment(self, ttft_ms: float, tpot_ms: float) -> float:
        """Share of requests that meet both targets; those never finished meet none."""
        met = (self.ttft_ms <= ttft_ms) & (self.tpot_ms <= tpot_ms)
        return float(np.count_nonzero(met)) / len(met)


class Fate(IntEnum):
    """What became of a request."""

    SERVED = 0
    TOO_LONG = 1
    """Its KV does not fit the instances that it was sent to, even alone."""
    UNFINISHED = 2
    """It waited for room for ever."""


@dataclass(frozen=True, slots=True)
class Instances:
    """One entry per instance, over the whole simulation."""

    busy_ms: Times
    """Time with a pass running (with pipeline stages: on the first stage)."""
    passes: Counts
    decode_passes: Counts
    """Those with decoding requests among them."""
    batch_peak: Counts
    """Most requests that decoded in one pass."""
    prompt_tokens: Counts
    """Computed, recomputation included."""
    decode_tokens: Counts
    kv_token_ms: Times
    """Integral of the KV tokens held over time."""
    kv_peak_tokens: Counts
    kv_left_tokens: Counts
    """Still held at the end; 0 unless requests were left unfinished."""
    num_preemptions: Counts
    duration_ms: float
    """From 0 to the last event."""

    @property
    def mean_batch(self) -> Times:
        """Decoding requests per pass that had any; nan without such passes."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self.decode_tokens / self.decode_passes, np.float64)

    def kv_usage(self, kv_capacity_tokens: Counts) -> Times:
        """Share of the KV memory (tokens per instance) in use, mean over the simulation."""
        return np.asarray(self.kv_token_ms / (kv_capacity_tokens * self.duration_ms), np.float64)

    def mfu(self, flops_per_token: float, peak_flops: float | Times) -> Times:
        """Model FLOPs utilisation of each instance over the simulation (Vidur, section 5.2).

        `peak_flops`: per second, all GPUs of one instance; one figure, or one per instance.
        Recomputed tokens count as work.
        """
        tokens = self.prompt_tokens + self.decode_tokens
        share = tokens * flops_per_token / (peak_flops * self.duration_ms / 1000)
        return np.asarray(share, np.float64)
