"""Gives vLLM's data-parallel ranks on CPU two collective operations and the choice of own experts.

Loaded by vLLM (entry point `vllm.general_plugins`) in each of its processes; does nothing unless an
agent started the engine, and nothing on GPUs. Before the experts of a layer, the ranks gather each
other's rows, and afterwards each gets the sum of its own rows. Their numbers differ by rank. vLLM
0.32 has operations for that on GPUs only: a data-parallel engine on CPU starts, and fails with
NotImplementedError in its first step (`CpuCommunicator.all_gatherv`). With expert parallelism a
rank has some of the experts only. vLLM's kernel for CPUs takes the numbers of all experts for those
of its own, and ends with a segmentation fault (`CPUUnquantizedExperts.apply`, which ignores its
`expert_map`; quantised experts have classes of their own and are left as they are).
"""

import os
from inspect import signature
from itertools import accumulate
from typing import Any

from cleave.shm.load_page import ENV

_IDS, _WEIGHTS, _MAP = "topk_ids", "topk_weights", "expert_map"
"""Arguments of vLLM's experts, by name."""


def complete_ranks() -> None:
    """Add the operations to vLLM's communicator for CPUs, and the choice of own experts to its
    experts."""
    if ENV not in os.environ:
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator.all_gatherv = collect_rows
    CpuCommunicator.reduce_scatterv = add_rows
    _choose_own_experts()


def select_own(weights: Any, ids: Any, expert_map: Any) -> tuple[Any, Any]:  # noqa: ANN401
    """Return the weights and numbers of the experts of each row on this rank. `expert_map`: the
    own number of each expert, -1 for those of other ranks, which get the weight 0."""
    own = expert_map[ids.long()].to(ids.dtype)
    return weights.masked_fill(own < 0, 0), own.clamp(min=0)


def _choose_own_experts() -> None:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    apply = CPUUnquantizedExperts.apply
    parameters = signature(apply)

    def apply_own(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        bound = parameters.bind(*args, **kwargs)
        named = bound.arguments
        if named[_MAP] is not None:
            named[_WEIGHTS], named[_IDS] = select_own(named[_WEIGHTS], named[_IDS], named[_MAP])
        apply(*bound.args, **bound.kwargs)

    CPUUnquantizedExperts.apply = apply_own


def collect_rows(
    communicator: Any,  # noqa: ANN401
    input_: Any,  # noqa: ANN401
    dim: int = 0,
    sizes: list[int] | None = None,
) -> Any:  # noqa: ANN401
    """Gather the rows of a tensor, or of each of a list of tensors, from all ranks; `sizes`: rows
    by rank, None: equally many. Raises NotImplementedError for another `dim` than 0."""
    if dim != 0:
        raise NotImplementedError(f"rows are gathered along dim 0, not {dim}")
    if isinstance(input_, list):
        return [collect_rows(communicator, each, dim, sizes) for each in input_]
    counts = sizes or [input_.shape[0]] * communicator.world_size
    return _collect_rows(communicator, input_, counts)


def add_rows(
    communicator: Any,  # noqa: ANN401
    input_: Any,  # noqa: ANN401
    dim: int = -1,
    sizes: list[int] | None = None,
) -> Any:  # noqa: ANN401
    """Add up a tensor over all ranks and return this rank's rows of the sum; `sizes`: rows by rank,
    None: equally many. Raises NotImplementedError for another `dim` than the first."""
    import torch.distributed

    if dim % input_.dim() != 0:
        raise NotImplementedError(f"rows are scattered along dim 0, not {dim}")
    size, rank = communicator.world_size, communicator.rank_in_group
    counts = sizes or [input_.shape[0] // size] * size
    total = input_.contiguous().clone()
    torch.distributed.all_reduce(total, group=communicator.device_group)
    start = [0, *accumulate(counts)][rank]
    return total[start : start + counts[rank]].clone()


def _collect_rows(communicator: Any, rows: Any, counts: list[int]) -> Any:  # noqa: ANN401
    """Gloo gathers tensors of one size only, so each rank sends as many rows as the largest has."""
    import torch

    longest = max(counts)
    sent = rows.new_zeros((longest, *rows.shape[1:]))
    sent[: rows.shape[0]] = rows
    received = [torch.empty_like(sent) for _ in counts]
    torch.distributed.all_gather(received, sent, group=communicator.device_group)
    return torch.cat([part[:count] for part, count in zip(received, counts, strict=True)])
