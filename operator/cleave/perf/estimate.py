"""Interface: iteration times and memory of one instance, for the planner.

The implementations choose among sources (measured profiles, kernel tables, roofline), each in its
module; the planner does not depend on them.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from cleave.perf.known_errors import ServingErrors
from cleave.perf.timing import EngineTiming


class LatencySource(StrEnum):
    """Kind of the source of iteration times, the nearest to a running engine first."""

    MEASURED = "measured"
    """A measured profile of this model on this device."""
    KERNELS = "kernels"
    """Summed over published measurements of the engine's kernels on this device."""
    ROOFLINE = "roofline"
    """Computed from FLOPs and bytes with efficiencies calibrated on other models."""


@dataclass(frozen=True, slots=True)
class Confidence:
    """The source of iteration times and its error."""

    kind: LatencySource
    source: str
    """Short description of the profile, tables or calibration."""
    error: float | None
    """Mean absolute percentage error of iterations that were held out of a fit, 0.05 for 5 %; None:
    not known."""
    serving: ServingErrors | None = None
    """Errors of latencies beside published runs; None: not compared with any."""
    has_stages: bool = False
    """Whether pipeline stages were derived from times without them. No published run has any."""

    @property
    def rank(self) -> tuple[float, int]:
        """Lower for a source that errs less: by its known error, of TPOT where there were runs,
        then by its kind. Not known is more than every known error."""
        error = self.serving.tpot.median if self.serving else self.error
        return math.inf if error is None else error, list(LatencySource).index(self.kind)


@dataclass(frozen=True, slots=True)
class Estimate:
    """One model on one kind of GPU with one parallelism. Times and tokens are those of one engine:
    of the instance, or of each of its data-parallel ranks while all have equal rows; FLOP/s, power
    and price are those of the instance."""

    timing: EngineTiming
    kv_capacity_tokens: int
    """Tokens of KV that fit on one engine, over all its GPUs."""
    prefill_saturation_tokens: int
    """DistServe's L_m: prompt tokens from which a prefill iteration is bound by compute."""
    max_model_len: int
    """Longest prompt plus output with which an instance starts: KV has room for such a request."""
    kv_bytes_per_token: int
    """Sum over all layers and all GPUs of an engine."""
    flops_per_token: float
    """FLOPs of the linear layers for one token, over all layers (for MFU)."""
    power_watts: float
    """Provisioned power of all GPUs of the instance."""
    cost_per_hour: float
    confidence: Confidence
    front_end_ms: float = 0.0
    """Latency of a request besides its iterations; 0 for profiles and emulation."""
    peak_flops: float | None = None
    """Dense FLOP/s of all GPUs of the instance in the precision of its matrix products, without a
    power cap (for MFU); None: not known, for example of an emulated engine or of 4 bits."""
    host_token_ms: float = 0.0
    """ms to copy the KV of one token back from the host's memory, to all GPUs of an engine at once;
    0: not known."""


class Estimator(Protocol):
    """Estimates instances of one model, by GPU and parallel sizes: tensor and pipeline of each of
    `data` ranks, and with `expert` whole experts on different GPUs."""

    def estimate(
        self, gpu: str, tensor: int, pipeline: int, data: int = 1, *, expert: bool = False
    ) -> Estimate | None:
        """None: not supported, for the reason that `explain_unsupported` gives."""

    def explain_unsupported(
        self, gpu: str, tensor: int, pipeline: int, data: int = 1, *, expert: bool = False
    ) -> str | None:
        """Why `estimate` returns None, in one sentence; None: it returns an estimate."""
