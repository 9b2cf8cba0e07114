"""What prompts that repeat are worth: the selected plan beside the one without prefix hits. Pure.

Called by the search where the traffic says which prompts begin alike; it plans the same requests a
second time, as if none of their prompts repeated.
"""

from cleave.planner.plan import Plan, PlannedPool, PlanningResult, ReuseWorth
from cleave.planner.result.text import format_percent, format_plan


def compare_with_blind(selected: Plan, blind: PlanningResult) -> ReuseWorth:
    """`blind`: the result for the same requests without reuse."""
    share = selected.prediction.cached_share
    return ReuseWorth(
        cached_share=share,
        gpus=selected.gpus,
        gpus_without=blind.selected.gpus if blind.selected else None,
        text=(
            f"{format_percent(share)} of the prompt tokens are in prefix caches; without reuse "
            f"{_describe(selected, blind.selected)}"
        ),
    )


def _describe(selected: Plan, blind: Plan | None) -> str:
    if blind is None:
        return "no plan meets the SLO"
    if [*map(_get_kind, selected.pools)] != [*map(_get_kind, blind.pools)]:
        changed = f", {blind.gpus} instead of {selected.gpus} GPUs"
        is_equal = blind.gpus == selected.gpus
        return f"{format_plan(blind)} would be needed{' instead' if is_equal else changed}"
    changes = [
        f"{other.replicas} instead of {pool.replicas} {pool.role} instances"
        for pool, other in zip(selected.pools, blind.pools, strict=True)
        if pool.replicas != other.replicas
    ]
    return f"{' and '.join(changes) or 'the same instances'} would be needed"


def _get_kind(pool: PlannedPool) -> tuple[object, ...]:
    return pool.role, pool.parallelism, pool.gpu
