"""vLLM's CPU workers stay on their cores."""

import os

import pytest

from cleave.shm.load_page import ENV
from cleave_worker.vllm.cpu_affinity import restrict_cpu_topology, restrict_nodes


@pytest.mark.parametrize(
    ("nodes", "own", "expected"),
    [
        ([[0, 1, 2, 3]], {1}, [[1]]),
        ([[0, 1], [2, 3]], {1, 2, 3}, [[1], [2, 3]]),
        ([[0, 1], [2, 3]], {3}, [[3]]),
        ([[1, 3]], {0, 2}, [[0, 2]]),
        ([], {0}, [[0]]),
    ],
)
def test_only_own_cores_remain(
    nodes: list[list[int]], own: set[int], expected: list[list[int]]
) -> None:
    assert restrict_nodes(nodes, own) == expected


def test_vllm_itself_sees_own_cores_only(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = pytest.importorskip("vllm.platforms.cpu")
    monkeypatch.setattr(
        cpu.CpuPlatform, "discover_numa_topology", cpu.CpuPlatform.discover_numa_topology
    )
    monkeypatch.setenv(ENV, "/dev/null")
    affinity = os.sched_getaffinity(0)
    core = min(affinity)
    os.sched_setaffinity(0, {core})
    try:
        restrict_cpu_topology()
        assert cpu.CpuPlatform.discover_numa_topology() == [[core]]
    finally:
        os.sched_setaffinity(0, affinity)


def test_an_engine_without_an_agent_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = pytest.importorskip("vllm.platforms.cpu")
    before = cpu.CpuPlatform.discover_numa_topology
    monkeypatch.delenv(ENV, raising=False)
    restrict_cpu_topology()
    assert cpu.CpuPlatform.discover_numa_topology == before
