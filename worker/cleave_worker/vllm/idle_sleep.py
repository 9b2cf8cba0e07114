"""Makes vLLM's CPU processes sleep while they wait, which leaves the cores to computation.

Loaded by vLLM (entry point `vllm.general_plugins`) in each of its processes; does nothing unless an
agent started the engine, and nothing on GPUs, where no step computes on the waiting cores. Two
waits of vLLM look idle and are not:

- Scheduler and workers wait for messages by calling `sched_yield` in a loop. Beside a busy process
  on the same core (Linux 6.18) such a waiter hardly ever runs: it checks 600 times a second, a
  waiter that sleeps checks 12,000 times.
- NIXL's progress thread polls its sockets without a timeout, which takes a quarter of the worker's
  core and more. Its events end a longer poll just as well.
"""

import os
import time
from typing import Any

from cleave.shm.load_page import ENV

MESSAGE_POLL_S = 20e-6
"""Interval between checks for a message; a step takes milliseconds."""

NIXL_POLL_US = 1000
"""Longest sleep of the progress thread without an event."""


def sleep_while_waiting() -> None:
    """Replace both waits in this process."""
    if ENV not in os.environ:
        return
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _patch_message_wait()
        _patch_nixl_polling()


def _patch_message_wait() -> None:
    from vllm.distributed import utils
    from vllm.distributed.device_communicators import shm_broadcast

    utils.sched_yield = shm_broadcast.sched_yield = _sleep_briefly


def _sleep_briefly() -> None:
    time.sleep(MESSAGE_POLL_S)


def _patch_nixl_polling() -> None:
    try:
        from nixl import _api
    except ImportError:
        return  # Mixed instances need no transfers.

    class SleepingAgentConfig(_api.nixlBind.nixlAgentConfig):
        """NIXL's Python API sets the delay to 0 and offers no other value."""

        def __setattr__(self, name: str, value: Any) -> None:  # noqa: ANN401
            super().__setattr__(name, NIXL_POLL_US if name == "pthrDelay" else value)

    _api.nixlBind.nixlAgentConfig = SleepingAgentConfig
