"""What prompts that repeat are worth: the selected plan beside the one without prefix hits. Pure.

Called by the search where the traffic says which prompts begin alike; it lists placements for the
same requests a second time, as if none of their prompts repeated. What host memory would find in
addition, where none is configured, is not simulated, but read from the reuse curve of these
requests.
"""

from collections.abc import Sequence

from cleave.api.role import Role
from cleave.planner.plan import EMULATED_GPU, Plan, PlannedPool, ReuseWorth
from cleave.planner.result.text import format_percent, format_pools
from cleave.planner.search.candidate_placement import CandidatePlacement
from cleave.simulator.trace import Trace
from cleave.traffic.reuse_curve import build_curve, measure_reuse

_HOST_SIZES_GIB = tuple(1 << step for step in range(3, 11))
"""Sizes of host memory that are compared, for each instance."""
_MOST_OF_GAIN = 0.9
_LEAST_GAIN = 0.02
"""Of the prompt tokens."""

Pools = Sequence[PlannedPool]


def compare_with_blind(
    selected: Plan,
    blind: Pools | None,
    host_memory: str | None = None,
    *,
    has_host_memory: bool = False,
) -> ReuseWorth:
    """`blind`: the smallest pools for the same requests without reuse; None: none serve them.
    `host_memory`: what `estimate_host_memory` says. `has_host_memory`: some is configured, so that
    it was simulated."""
    share = selected.prediction.cached_share
    return ReuseWorth(
        cached_share=share,
        gpus=selected.gpus,
        gpus_without=None if blind is None else _count_gpus(blind),
        text=(
            f"{format_percent(share)} of the prompt tokens are in prefix caches"
            f"{' or host memory' if has_host_memory else ''}; without reuse "
            f"{_describe(selected, blind)}{f'; {host_memory}' if host_memory else ''}"
        ),
    )


def estimate_host_memory(placement: CandidatePlacement, trace: Trace, first: int) -> str | None:
    """Which share of the prompt tokens copies of KV in host memory would find that GPUs have
    evicted, as a clause; None: too small a share. `trace`: the requests of one cell of `placement`,
    of which the first `first` fill caches. The size is the smallest that has most of the gain.

    The instances count as one cache, so the estimate is an upper bound where prompts spread. Host
    memory has copies of what is on GPUs, so it adds what is larger in it than there.
    """
    instances = placement.groups
    computing = [each for each in instances if each.role is not Role.DECODE]
    candidate = computing[0].instance.candidate
    if candidate.supply.gpu == EMULATED_GPU or trace.blocks is None:
        return None
    counted_s = float(trace.arrival_ms[-1] - trace.arrival_ms[first]) / 1000
    reuse = measure_reuse(trace) - measure_reuse(trace.take_first(first))
    # Answers stay at decode instances where prompts are computed elsewhere.
    is_apart = len(computing) < len(instances)
    written = 0.0 if is_apart else float(trace.output_tokens[first:].sum()) / counted_s
    curve = build_curve(reuse, reuse.num / counted_s, written)
    held = sum(each.replicas * each.instance.engine.kv_capacity_tokens for each in computing)
    num = sum(each.replicas for each in computing)

    def find_gain(gib: int) -> float:
        copies = num * gib * 2**30 / candidate.estimate.kv_bytes_per_token
        return curve.find_share(max(held, copies)) - curve.find_share(held)

    most = find_gain(_HOST_SIZES_GIB[-1])
    gib = next(each for each in _HOST_SIZES_GIB if find_gain(each) >= _MOST_OF_GAIN * most)
    if (gain := find_gain(gib)) < _LEAST_GAIN:
        return None
    size = f"{gib} GiB of host memory for each instance (engine.kvOffloadingGib)"
    return f"{size} would find up to {format_percent(gain)} more (estimated)"


def _describe(selected: Plan, blind: Pools | None) -> str:
    if blind is None:
        return "no plan meets the SLO"
    if [*map(_get_kind, selected.pools)] != [*map(_get_kind, blind)]:
        gpus = _count_gpus(blind)
        changed = f", {gpus} instead of {selected.gpus} GPUs"
        label = format_pools(blind, is_gpu_chosen=selected.is_gpu_chosen)
        return f"{label} would be needed{' instead' if gpus == selected.gpus else changed}"
    changes = [
        f"{other.replicas} instead of {pool.replicas} {pool.role} instances"
        for pool, other in zip(selected.pools, blind, strict=True)
        if pool.replicas != other.replicas
    ]
    return f"{' and '.join(changes) or 'the same instances'} would be needed"


def _count_gpus(pools: Pools) -> int:
    return sum(pool.gpus for pool in pools)


def _get_kind(pool: PlannedPool) -> tuple[object, ...]:
    return pool.role, pool.parallelism, pool.gpu
