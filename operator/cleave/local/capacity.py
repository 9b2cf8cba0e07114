"""Whether a set of pods fits this machine, said before any of them starts.

Pure; called by `up`.
"""

from collections.abc import Sequence

from cleave.local.node import Node
from cleave.local.pod_spec import parse
from cleave.local.quantities import gib
from cleave.pods.labels import Manifest


def faults(pods: Sequence[Manifest], node: Node, *, allow_shared_cores: bool) -> list[str]:
    """One line per resource that is short, with the remedy; empty when everything fits."""
    specs = [parse(pod) for pod in pods]
    found = []
    memory = sum(spec.memory_bytes for spec in specs)
    if memory > node.memory_bytes:
        found.append(
            f"{gib(memory)} of memory needed for {len(specs)} pods, {gib(node.memory_bytes)} "
            "available; use fewer replicas or lower spec.template.resources"
        )
    cores = sum(spec.exclusive_cores for spec in specs)
    if cores > len(node.free_cores) and not allow_shared_cores:
        held = f", {len(node.held_cores)} held by other engines" if node.held_cores else ""
        found.append(
            f"{cores} exclusive cores needed, {len(node.cores)} here{held}; use fewer replicas, or "
            "--allow-shared-cores to share them (slower, timings mean little)"
        )
    gpus = sum(spec.gpus for spec in specs)
    if gpus > len(node.gpus):
        found.append(f"{gpus} GPUs needed, {len(node.gpus)} here; use fewer replicas")
    return found
