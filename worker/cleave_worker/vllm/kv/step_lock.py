"""Lets other threads of vLLM's scheduler process use its block pool between two of its operations.

vLLM's pool is of one thread, which also blocks without a time limit while the engine is idle, so
nothing that it calls can serve other engines. A lock around the operations of the scheduler that
use the pool excludes the others; each takes a millisecond. The lock also counts steps. vLLM enters
blocks into its prefix cache when it schedules the step that computes them, so they are complete
only when that step has been processed.
"""

import functools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

_SCHEDULE, _PROCESS = "schedule", "update_from_output"
_OPERATIONS = (_SCHEDULE, _PROCESS, "finish_requests", "reset_prefix_cache")
"""All methods of vLLM's scheduler through which its engine core changes the pool."""


class StepLock:
    """Excludes the scheduler while it is held; a scheduler's operations may be nested."""

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.RLock())
        self._num_scheduled = 0
        self._num_processed = 0

    def __enter__(self) -> None:
        self._condition.acquire()

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._condition.release()

    def record_scheduled(self) -> None:
        """Count a step that the engine is to run."""
        self._num_scheduled += 1

    def record_processed(self) -> None:
        """Count a step whose output is here, so that all of its KV is written."""
        with self._condition:
            self._num_processed += 1
            self._condition.notify_all()

    def wait_for_steps(self, seconds: float) -> bool:
        """Wait until all steps that are scheduled now have ended; return whether they have. Must
        not be called while the lock is held."""
        with self._condition:
            last = self._num_scheduled
            return self._condition.wait_for(lambda: self._num_processed >= last, seconds)


STEP_LOCK = StepLock()
"""Of the scheduler of this process; there is one."""


@functools.cache
def lock_scheduler() -> None:
    """Let the scheduler of this process hold `STEP_LOCK` in its operations."""
    for name in _OPERATIONS:
        setattr(Scheduler, name, _lock_operation(getattr(Scheduler, name)))


def _lock_operation(operation: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(operation)
    def run_locked(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        with STEP_LOCK:
            result = operation(*args, **kwargs)
            if operation.__name__ == _SCHEDULE:
                STEP_LOCK.record_scheduled()
            elif operation.__name__ == _PROCESS:
                STEP_LOCK.record_processed()
            return result

    return run_locked
