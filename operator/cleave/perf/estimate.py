"""One instance's passes and memory, from whatever is known about its model and device.

Called by the planner, which does not care where times come from. This is the interface; the
sources (measured profiles, published fits, roofline) are modules of their own.
"""

from dataclasses import dataclass
from typing import Protocol

from cleave.perf.timing import Timing
from cleave.perf.trust import Trust


@dataclass(frozen=True, slots=True)
class Estimate:
    """One model on one kind of GPU with one parallelism."""

    timing: Timing
    kv_capacity_tokens: int
    """Tokens of KV that one instance holds; all its GPUs together."""
    prefill_saturation_tokens: int
    """DistServe's L_m: prompt tokens from which a prefill pass is bound by compute."""
    max_model_len: int
    """Longest prompt plus output."""
    kv_bytes_per_token: int
    """Of the whole model, over all GPUs of an instance."""
    flops_per_token: float
    """Of one token's linear layers, whole model (for MFU)."""
    power_watts: float
    """Provisioned, all GPUs of the instance."""
    cost_per_hour: float
    trust: Trust
    peak_flops: float | None = None
    """Dense FLOP/s of all GPUs of the instance in the precision of the weights' products, without
    a power cap (for MFU); None: not known, as of an emulated engine."""


class Estimator(Protocol):
    """Knows one model."""

    def estimate(
        self, gpu: str, tensor_parallel_size: int, pipeline_parallel_size: int
    ) -> Estimate | None:
        """None: the model does not fit, cannot be split so, or nothing is known about it."""

    def why_not(
        self, gpu: str, tensor_parallel_size: int, pipeline_parallel_size: int
    ) -> str | None:
        """The reason in one sentence why `estimate` has no answer; None: it has one."""
