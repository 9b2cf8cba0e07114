"""What prompts that repeat are worth: the selected plan beside the one without prefix hits. Pure.

Called by the search where the traffic says which prompts begin alike; it lists placements for the
same requests a second time, as if none of their prompts repeated.
"""

from collections.abc import Sequence

from cleave.planner.plan import Plan, PlannedPool, ReuseWorth
from cleave.planner.result.text import format_percent, format_pools

Pools = Sequence[PlannedPool]


def compare_with_blind(selected: Plan, blind: Pools | None) -> ReuseWorth:
    """`blind`: the smallest pools for the same requests without reuse; None: none serve them."""
    share = selected.prediction.cached_share
    return ReuseWorth(
        cached_share=share,
        gpus=selected.gpus,
        gpus_without=None if blind is None else _count_gpus(blind),
        text=(
            f"{format_percent(share)} of the prompt tokens are in prefix caches; without reuse "
            f"{_describe(selected, blind)}"
        ),
    )


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
