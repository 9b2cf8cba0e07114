"""Disables FlashInfer in vLLM on GPUs where it cannot compile its kernels.

Loaded by vLLM (entry point `vllm.general_plugins`) in each of its processes; does nothing unless an
agent started the engine. `has_flashinfer` is False without nvcc and FlashInfer's prebuilt kernels,
but vLLM 0.32 imports FlashInfer without this check, for instance for attention on Blackwell, where
it is the first choice, and then fails in its warm-up. When the import fails, vLLM takes the next
choice, FlashAttention, which is the first choice on Hopper anyway.
"""

import os
import sys

from cleave.shm.load_page import ENV


def disable_unusable_flashinfer() -> None:
    """Let `import flashinfer` fail where vLLM's own check says that it cannot be used.
    `VLLM_USE_FLASHINFER_SAMPLER=1` keeps it, for kernels that this check does not find."""
    if ENV not in os.environ:
        return
    from vllm import envs
    from vllm.platforms import current_platform
    from vllm.utils.flashinfer import has_flashinfer

    if current_platform.is_cuda() and not envs.VLLM_USE_FLASHINFER_SAMPLER and not has_flashinfer():
        sys.modules["flashinfer"] = None  # type: ignore[assignment]
