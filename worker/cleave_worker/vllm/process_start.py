"""Starts vLLM's processes on CPU by fork, so that an engine imports vLLM once instead of thrice.

Loaded by vLLM (entry point `vllm.general_plugins`) in the API server; does nothing unless an agent
started the engine, and nothing on GPUs. vLLM forks its engine core on GPUs, but on CPU it spawns
core and workers, because a worker's OpenMP takes its cores and libraries from the environment when
it is loaded. Every import takes 20 seconds of a core. The core and the coordinator of data-parallel
ranks compute nothing, so they are always forked; a worker is when the agent started the API server
with the environment of its only worker (`cleave_worker.agent.launch`), whose one thread leaves
nothing behind that a fork would break.
"""

import multiprocessing
import os
from multiprocessing.context import BaseContext

from cleave.shm.load_page import ENV


def enable_forking() -> None:
    """Replace the start method of the engine core, and of the worker where that is possible."""
    if ENV not in os.environ:
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.engine import coordinator, utils
    from vllm.v1.executor import multiproc_executor

    utils.get_mp_context = coordinator.get_mp_context = _get_fork_context
    if has_worker_environment():
        multiproc_executor.get_mp_context = _get_fork_context


def has_worker_environment() -> bool:
    """Return whether this process was started with the libraries and the one thread of a worker."""
    preloaded = os.environ.get("LD_PRELOAD", "")
    return "libgomp" in preloaded and os.environ.get("OMP_NUM_THREADS") == "1"


def _get_fork_context() -> BaseContext:
    return multiprocessing.get_context("fork")
