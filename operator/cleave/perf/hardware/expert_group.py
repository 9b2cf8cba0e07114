"""The GPUs that share the experts of a model's layers: all GPUs of an instance's engines.

Used by cleave.perf.kernels and cleave.perf.roofline. An engine, or each of the data-parallel ranks
of an instance, has attention and dense layers of its own. Experts are shared by all ranks, as vLLM
0.32 does it (`FusedMoEParallelConfig.make`): with expert parallelism as wholes over tensor * data
GPUs, without it as slices of each expert over the same GPUs. What is hard: ranks compute in step,
and vLLM pads all of them to the rows of the largest where it replays CUDA graphs
(`vllm.v1.worker.dp_utils`). Iterations are therefore priced as if all ranks had the same rows; the
simulator takes the longest of the ranks.
"""

from dataclasses import dataclass

from cleave.perf.hardware.all_to_all import AllToAllBackend, GpuGroup, compute_all_to_all_ms

BALANCED, UNBALANCED = 1.2, 2.0
"""Tokens of the busiest GPU's experts divided by the mean, with vLLM's `--enable-eplb` and without:
assumptions. SGLang found 1.49 (prefill) and 2.54 (decode) times the throughput with balanced
experts (lmsys.org/blog/2025-05-05-large-scale-ep)."""


@dataclass(frozen=True, slots=True)
class ExpertSettings:
    """What an engine's arguments say about experts on several GPUs."""

    backend: AllToAllBackend = AllToAllBackend.ALL_GATHER
    imbalance: float = UNBALANCED


VLLM_EXPERTS = ExpertSettings()
"""vLLM's defaults."""


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """How one instance shares its experts."""

    data: int
    """Data-parallel ranks; 1: the instance is one engine."""
    is_whole: bool
    """Expert parallelism: whole experts on different GPUs, not slices of each."""
    gpus: GpuGroup
    settings: ExpertSettings = VLLM_EXPERTS

    @property
    def imbalance(self) -> float:
        """Work of the busiest GPU's experts, as a multiple of the mean."""
        return self.settings.imbalance if self.is_whole else 1.0

    def compute_exchange_ms(self, rows: float, hidden_size: int, per_token: int) -> float:
        """Dispatch and combine of one layer with `rows` tokens on each rank. The GPUs of a rank
        divide its tokens (vLLM's sequence-parallel experts); without other ranks all GPUs have all
        tokens, and the all-reduce after the experts combines them."""
        if self.data == 1:
            return 0.0
        backend = self.settings.backend if self.is_whole else AllToAllBackend.ALL_GATHER
        own = rows * self.data / self.gpus.gpus
        return compute_all_to_all_ms(self.gpus, backend, own, hidden_size, per_token)
