"""Checks before start-up whether a set of pods fits this machine. Pure; called by `up`.

Cores, memory and GPUs are compared with the requests of all pods.
"""

from collections.abc import Sequence

from cleave.local.kubelet.node import LocalNode
from cleave.local.kubelet.pod_spec import parse_pod
from cleave.local.kubelet.quantities import format_gib
from cleave.manifests.labels import Manifest


def find_shortages(
    pods: Sequence[Manifest], node: LocalNode, *, allow_shared_cores: bool
) -> list[str]:
    """Return one line per resource that is too small, with the remedy; empty when all pods fit."""
    specs = [parse_pod(pod) for pod in pods]
    shortages = []
    memory = sum(spec.memory_bytes for spec in specs)
    if memory > node.memory_bytes:
        shortages.append(
            f"{format_gib(memory)} of memory needed for {len(specs)} pods, "
            f"{format_gib(node.memory_bytes)} available; "
            "use fewer replicas or lower spec.template.resources"
        )
    cores = sum(spec.exclusive_cores for spec in specs)
    if cores > len(node.free_cores) and not allow_shared_cores:
        reserved = f", {len(node.held_cores)} used by other engines" if node.held_cores else ""
        shortages.append(
            f"{cores} exclusive cores needed, {len(node.cores)} available{reserved}; "
            "use fewer replicas, or --allow-shared-cores to share them (slower, unreliable timings)"
        )
    gpus = sum(spec.gpus for spec in specs)
    if gpus > len(node.gpus):
        shortages.append(f"{gpus} GPUs needed, {len(node.gpus)} available; use fewer replicas")
    return shortages
