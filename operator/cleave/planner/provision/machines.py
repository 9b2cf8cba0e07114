"""Builds the machine types of a cluster, and pairs of them, for `search`.

Called by `cleave provision`. A machine is a node with one instance of the model on all its GPUs,
like Splitwise's DGX machines (sections IV-D and V). The number of nodes in the cluster is ignored:
it is the result.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cleave.api.cluster import Cluster
from cleave.api.planning import GpuChoice
from cleave.perf.estimator import build_estimator
from cleave.perf.hardware.gpu import find_gpu
from cleave.perf.hardware.kv_transfer import build_kv_transfer
from cleave.perf.hardware.link import Link, select_slower
from cleave.perf.model.model_shape import ModelShape
from cleave.planner.problem import Problem, Supply
from cleave.planner.provision.search import MachinePair, MachineType, ProvisioningError
from cleave.simulator.fleet import SimulatedTransfer
from cleave.traffic.workload import Demand

_NO_OVERLAP = 1 << 40
_MAX_NODE_WATTS = {
    "A100-SXM-80GB": 6_500.0,
    "H100-SXM-80GB": 10_200.0,
    "H200-SXM-141GB": 10_200.0,
    "B200-SXM-180GB": 14_300.0,
}
"""Maximum power of NVIDIA's DGX with eight of a GPU, from its data sheets; Splitwise's simulator
has the same for the first two."""
_NODE_POWER_RATIO = 1.8
"""Power of a node over that of its GPUs where it is not known: that of DGX H100 and B200."""
_PROMPT_TOKENS = 1024
"""Prompt length at which the compute time per token is taken."""


@dataclass(frozen=True, slots=True)
class MachineNode:
    """A machine with the properties that its KV transfers depend on."""

    machine: MachineType
    sizes: tuple[int, int]
    """Tensor and pipeline parallel size."""
    network_link: Link


def list_nodes(problem: Problem, suffix: str = "") -> tuple[MachineNode, ...]:
    """One machine type per GPU type; `suffix` is added to their names.

    Of the parallel sizes that use all GPUs of a node, the one with the most tensor parallelism is
    used. Raises ProvisioningError when the model fits no type of node.
    """
    nodes_found, missing = [], []
    for supply in {each.gpu: each for each in problem.supplies}.values():
        node = _build_node(problem, supply, suffix)
        if node is None:
            reason = problem.estimator.explain_unsupported(supply.gpu, supply.gpus_per_node, 1)
            missing.append(f"{supply.gpus_per_node} x {supply.gpu}: {reason}")
        else:
            nodes_found.append(node)
    if not nodes_found:
        raise ProvisioningError(f"the model fits no type of node ({'; '.join(missing)})")
    return tuple(nodes_found)


def apply_power_cap(
    problem: Problem, uncapped: Sequence[MachineNode], cluster: Cluster, folder: Path, share: float
) -> tuple[MachineNode, ...]:
    """The same machines with each GPU limited to `share` of its power (HHcap's token machines); the
    rest of a machine takes as much as before.

    `folder` contains the cluster's profiles. Raises ManifestError for a share so low that its
    effect is unknown.
    """
    choices = [
        GpuChoice(
            type=node.machine.name,
            power_cap_watts=share * node.machine.estimate.power_watts / math.prod(node.sizes),
            price_per_hour=node.machine.estimate.cost_per_hour / math.prod(node.sizes),
        )
        for node in uncapped
    ]
    estimator = build_estimator(problem.shape, cluster, choices, folder)
    capped = list_nodes(replace(problem, estimator=estimator), f" at {share:.0%}")
    return tuple(
        replace(node, machine=replace(node.machine, host_watts=rated.machine.host_watts))
        for node, rated in zip(capped, uncapped, strict=True)
    )


def build_pairs(
    shape: ModelShape, prompt: Sequence[MachineNode], token: Sequence[MachineNode]
) -> tuple[MachinePair, ...]:
    """Every prompt type with every token type, and each prompt type with mixed machines."""
    disaggregated = (
        MachinePair(
            f"{each.machine.name} + {other.machine.name}",
            each.machine,
            other.machine,
            _build_transfer(shape, each, other),
        )
        for each in prompt
        for other in token
    )
    mixed = (MachinePair(f"{each.machine.name} mixed", each.machine, None) for each in prompt)
    return (*disaggregated, *mixed)


def find_slowest(candidates: Sequence[MachineNode], demand: Demand) -> MachineType:
    """The machine with the highest unloaded latency of a mean request: the slowdowns' reference."""
    prompt, output = round(demand.mean_prompt_tokens), demand.mean_output_tokens

    def alone_ms(node: MachineNode) -> float:
        timing = node.machine.estimate.timing
        return timing.predict_prefill_ms([prompt]) + output * timing.predict_decode_ms(1, prompt)

    return max(candidates, key=alone_ms).machine


def _build_node(problem: Problem, supply: Supply, suffix: str) -> MachineNode | None:
    gpus = supply.gpus_per_node
    for tensor in (size for size in range(gpus, 0, -1) if gpus % size == 0):
        sizes = (tensor, gpus // tensor)
        estimate = problem.estimator.estimate(supply.gpu, *sizes)
        if estimate is not None:
            host_watts = _compute_host_watts(supply.gpu, gpus, estimate.power_watts)
            machine = MachineType(supply.gpu + suffix, estimate, host_watts)
            return MachineNode(machine, sizes, supply.network_link)
    return None


def _compute_host_watts(gpu: str, gpus: int, gpu_watts: float) -> float:
    """Power of a node without its GPUs, which take `gpu_watts` together. A power cap on GPUs of the
    catalogue does not change it."""
    if gpu in _MAX_NODE_WATTS:
        return (_MAX_NODE_WATTS[gpu] / 8 - find_gpu(gpu).power_watts) * gpus
    return (_NODE_POWER_RATIO - 1) * gpu_watts


def _build_transfer(
    shape: ModelShape, prompt: MachineNode, token: MachineNode
) -> SimulatedTransfer:
    """Serialised for short prompts, layer-wise for long ones (Splitwise, section IV-C)."""
    prefill_ms = prompt.machine.estimate.timing.predict_prefill_ms([_PROMPT_TOKENS])
    link = select_slower(prompt.network_link, token.network_link)
    moved = build_kv_transfer(shape, link, prompt.sizes, token.sizes, prefill_ms / _PROMPT_TOKENS)
    return SimulatedTransfer(
        latency_ms=moved.latency_ms,
        token_ms=moved.token_ms,
        overlapped_token_ms=moved.overlapped_token_ms,
        overlap_from_tokens=moved.overlap_from_tokens or _NO_OVERLAP,
    )
