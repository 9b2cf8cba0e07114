"""Keeps vLLM's CPU workers on the cores of their own affinity.

Loaded by vLLM (entry point `vllm.general_plugins`) in each of its processes; does nothing unless an
agent started the engine. To leave a core for NIXL's transfer thread, vLLM pins a worker's main
thread to the last core of each NUMA node of the machine, regardless of its affinity. All engines of
a machine would then compute on one core, and in a cpuset without that core the engine could not
start. So the topology that vLLM reads is restricted to the process's own cores.
"""

import os
from collections.abc import Collection, Sequence

from cleave.shm.load_page import ENV


def restrict_cpu_topology() -> None:
    """Hide the cores that this process may not use from vLLM."""
    if ENV not in os.environ:
        return
    from vllm.platforms.cpu import CpuPlatform

    discover = CpuPlatform.discover_numa_topology

    def discover_own() -> list[list[int]]:
        return restrict_nodes(discover(), os.sched_getaffinity(0))

    CpuPlatform.discover_numa_topology = staticmethod(discover_own)


def restrict_nodes(nodes: Sequence[Sequence[int]], own: Collection[int]) -> list[list[int]]:
    """Return the cores of each NUMA node that are in `own`, or `own` as one node if there are none.
    vLLM lists one hardware thread per physical core, so all own threads may be missing."""
    restricted = [[core for core in node if core in own] for node in nodes]
    return [node for node in restricted if node] or [sorted(own)]
