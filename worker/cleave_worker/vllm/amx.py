"""Lets vLLM's CPU workers use AMX, the matrix extension that its attention kernels use.

Loaded by vLLM (entry point `vllm.general_plugins`) in each of its processes; does nothing unless an
agent started the engine, nor on processors without AMX. Linux allows AMX only to processes that
request it (Documentation/arch/x86/xstate.rst) and ends others with SIGILL. vLLM's attention does
not request it. In most engines oneDNN does, for its first product of many rows; a decode instance
that pulls all its KV never computes one.
"""

import logging
import os

from cleave.shm.load_page import ENV

_log = logging.getLogger(__name__)


def enable_amx() -> None:
    """Request AMX from the kernel for all threads of this process."""
    if ENV not in os.environ:
        return
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or not torch.cpu._is_amx_tile_supported():
        return
    if not torch.cpu._init_amx():
        _log.warning(
            "this processor has AMX, but the kernel does not allow it to this process: a model in "
            "bfloat16 will end it with SIGILL; allow the system call arch_prctl"
        )
