"""The lock that other threads take between the operations of vLLM's scheduler."""

import inspect
import threading
from typing import Any

import pytest

pytestmark = [
    pytest.mark.vllm,
    # vLLM and what it imports warn of their own future.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def step_lock() -> Any:
    pytest.importorskip("vllm.v1.core.sched.scheduler", reason="needs the group worker-cpu")
    from cleave_worker.vllm.kv import step_lock

    return step_lock


class Scheduler:
    """Operations named as vLLM's; each notes whether another thread got the lock meanwhile."""

    def __init__(self, lock: Any) -> None:
        self.lock = lock
        self.was_free: list[bool] = []

    def _try(self) -> None:
        def enter() -> None:
            free = self.lock._condition.acquire(blocking=False)
            self.was_free.append(free)
            if free:
                self.lock._condition.release()

        other = threading.Thread(target=enter)
        other.start()
        other.join(30)

    def schedule(self, throttle_prefills: bool = False) -> str:
        self._try()
        return f"step {throttle_prefills}"

    def update_from_output(self) -> None:
        self.finish_requests()
        self._try()

    def finish_requests(self) -> None:
        self._try()

    def reset_prefix_cache(self) -> None:
        self._try()


def test_no_other_thread_uses_the_pool_meanwhile(
    step_lock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = step_lock.StepLock()
    monkeypatch.setattr(step_lock, "STEP_LOCK", lock)
    monkeypatch.setattr(step_lock, "Scheduler", Scheduler)
    step_lock.lock_scheduler.__wrapped__()
    scheduler = Scheduler(lock)
    assert lock.wait_for_steps(0)
    assert scheduler.schedule(throttle_prefills=True) == "step True"
    assert not lock.wait_for_steps(0.01)
    scheduler.finish_requests()
    scheduler.reset_prefix_cache()
    assert not lock.wait_for_steps(0.01)
    scheduler.update_from_output()
    assert lock.wait_for_steps(0)
    assert scheduler.was_free == [False] * 5
    assert lock._condition.acquire(blocking=False)
    lock._condition.release()


def test_the_pool_is_used_in_the_locked_operations_only(step_lock: Any) -> None:
    """A method of vLLM's scheduler that uses the pool is one of those, or is called by one."""
    from vllm.v1.core.sched.scheduler import Scheduler as Real
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    called = {
        word.split("(")[0]
        for owner in (EngineCore, EngineCoreProc)
        for line in inspect.getsource(owner).split("self.scheduler.")[1:]
        for word in [line.split()[0]]
        if "(" in word
    }
    assert set(step_lock._OPERATIONS) <= called
    users = {
        name
        for name, method in inspect.getmembers(Real, inspect.isfunction)
        if "kv_cache_manager." in inspect.getsource(inspect.unwrap(method))
    }
    readers = {"get_kv_cache_usage", "make_stats", "__init__"}
    assert called & users <= {*step_lock._OPERATIONS, *readers}
    sources = {
        name: inspect.getsource(inspect.unwrap(getattr(Real, name)))
        for name in called
        if inspect.isfunction(getattr(Real, name, None))
    }
    for name in called - {*step_lock._OPERATIONS} & sources.keys():
        used = {user for user in users - readers if f"self.{user}(" in sources[name]}
        assert not used, f"{name} uses the pool through {used}"
