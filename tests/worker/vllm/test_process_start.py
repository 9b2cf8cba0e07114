"""vLLM's processes on CPU are forked."""

from types import ModuleType

import pytest

from cleave.shm.load_page import ENV
from cleave_worker.vllm.process_start import enable_forking


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """vLLM's modules that start the engine core and workers, restored afterwards, as is the one
    that starts the coordinator of data-parallel ranks."""
    core: ModuleType = pytest.importorskip("vllm.v1.engine.utils")
    worker: ModuleType = pytest.importorskip("vllm.v1.executor.multiproc_executor")
    for module in (core, worker, coordinator()):
        monkeypatch.setattr(module, "get_mp_context", module.get_mp_context)
    # As vLLM sets it on CPU.
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setenv("LD_PRELOAD", "")
    return core, worker


def coordinator() -> ModuleType:
    module: ModuleType = pytest.importorskip("vllm.v1.engine.coordinator")
    return module


def start_methods(modules: tuple[ModuleType, ...]) -> list[str]:
    return [module.get_mp_context().get_start_method() for module in modules]


def test_the_engine_core_is_forked_and_workers_with_cores_of_their_own_are_spawned(
    modules: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV, "/dev/null")
    enable_forking()
    assert start_methods(modules) == ["fork", "spawn"]
    assert start_methods((coordinator(),)) == ["fork"]


@pytest.mark.parametrize(("threads", "expected"), [("1", "fork"), ("2", "spawn")])
def test_a_worker_is_forked_from_a_process_with_its_libraries_and_one_thread(
    modules: tuple[ModuleType, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    threads: str,
    expected: str,
) -> None:
    monkeypatch.setenv(ENV, "/dev/null")
    monkeypatch.setenv("LD_PRELOAD", "/lib/libgomp.so.1")
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    enable_forking()
    assert start_methods(modules) == ["fork", expected]


def test_an_engine_without_an_agent_is_left_alone(
    modules: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENV, raising=False)
    enable_forking()
    assert start_methods(modules) == ["spawn", "spawn"]
