"""Keeps vLLM's CPU workers on the cores they were given.

Loaded by vLLM itself (entry point `vllm.general_plugins`) in each of its processes; does nothing
unless an agent started the engine. What is hard: to leave room for NIXL's transfer thread, vLLM
moves a worker's main thread to the last core of each NUMA node of the machine, whatever its
affinity. All engines of a machine would then compute on one core, and inside a cpuset that lacks
this core the engine could not start. The topology it asks for is cut down to the process's own set.
"""

import os
from collections.abc import Collection, Sequence

from cleave.metrics.load_page import ENV


def keep_own_cores() -> None:
    """Let vLLM see no core that this process may not use."""
    if ENV not in os.environ:
        return
    from vllm.platforms.cpu import CpuPlatform

    discover = CpuPlatform.discover_numa_topology

    def discover_own() -> list[list[int]]:
        return restrict(discover(), os.sched_getaffinity(0))

    CpuPlatform.discover_numa_topology = staticmethod(discover_own)


def restrict(nodes: Sequence[Sequence[int]], own: Collection[int]) -> list[list[int]]:
    """Cores of each NUMA node that are in `own`; when that leaves none, `own` is one node.

    vLLM lists one hardware thread per physical core, so the own threads may all be missing.
    """
    kept = [[core for core in node if core in own] for node in nodes]
    return [node for node in kept if node] or [sorted(own)]
