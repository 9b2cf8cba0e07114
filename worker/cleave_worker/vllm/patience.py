"""Makes vLLM's processes on CPU sleep while they wait, so that they leave the cores to the passes.

Loaded by vLLM itself (entry point `vllm.general_plugins`) in each of its processes; does nothing
unless an agent started the engine, and nothing on GPUs, where cores are many and passes elsewhere.
What is hard: both waits look polite and are not.

- Messages between scheduler and workers are awaited by calling `sched_yield` until they are there.
  Beside a busy process on the same core (Linux 6.18) such a waiter hardly ever runs: it looks 600
  times a second, one that sleeps 12,000 times.
- NIXL's progress thread polls its sockets with a time-out of zero, all the time: it takes a quarter
  of the worker's core and more. Its events wake it just as well out of a longer poll.
"""

import os
import time
from typing import Any

from cleave.metrics.load_page import ENV

WAIT_S = 20e-6
"""Between two looks for a message; a pass takes milliseconds."""

POLL_US = 1000
"""Longest sleep of the progress thread without an event."""


def sleep_while_waiting() -> None:
    """Replace both waits in this process."""
    if ENV not in os.environ:
        return
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _calm_messages()
        _calm_nixl()


def _calm_messages() -> None:
    from vllm.distributed import utils
    from vllm.distributed.device_communicators import shm_broadcast

    utils.sched_yield = shm_broadcast.sched_yield = _doze


def _doze() -> None:
    time.sleep(WAIT_S)


def _calm_nixl() -> None:
    try:
        from nixl import _api
    except ImportError:
        return  # Mixed instances need no transfers.
    plain = _api.nixlBind.nixlAgentConfig

    class PatientConfig(plain):  # type: ignore[misc, valid-type]
        """NIXL's Python door sets the delay to 0 and offers no other."""

        def __setattr__(self, name: str, value: Any) -> None:  # noqa: ANN401
            super().__setattr__(name, POLL_US if name == "pthrDelay" else value)

    _api.nixlBind.nixlAgentConfig = PatientConfig
