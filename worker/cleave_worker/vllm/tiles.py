"""Lets vLLM's CPU workers use the matrix registers (AMX tiles) its attention is written for.

Loaded by vLLM itself (entry point `vllm.general_plugins`) in each of its processes; does nothing
unless an agent started the engine, nor on processors without tiles. What is hard: Linux lends tiles
only to processes that ask (Documentation/arch/x86/xstate.rst), and kills the others with SIGILL.
vLLM's attention does not ask. Other engines are saved by oneDNN, which does for its first product
of many rows; a decode instance that pulls all its KV never computes one.
"""

import logging
import os

from cleave.metrics.load_page import ENV

_logger = logging.getLogger(__name__)


def ask_for_tiles() -> None:
    """Ask the kernel for AMX tiles, for all threads of this process."""
    if ENV not in os.environ:
        return
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or not torch.cpu._is_amx_tile_supported():
        return
    if not torch.cpu._init_amx():
        _logger.warning(
            "this processor has AMX tiles, but the kernel lends none to this process: a model in "
            "bfloat16 will end it with SIGILL; allow the system call arch_prctl"
        )
