"""Which instances a change of plans starts anew; and the same plan with as few as may be. Pure.

Called by replanning. Engines get their limits of a pass when they start, so a plan with other
limits replaces instances that would serve as well with those they have. What is hard: limits that
are best by themselves are seldom much better, and the search, which knows of no instances that
run, picks among near equals by chance.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from cleave.api.role import Role
from cleave.planner.plan import EMULATED_GPU, PlannedPool

Pools = tuple[PlannedPool, ...]


def count_begun(current: Sequence[PlannedPool], proposed: Sequence[PlannedPool]) -> int:
    """Instances of `proposed` that have to be made anew: some of `current` only change pools."""
    current_kinds, proposed_kinds = count_kinds(current), count_kinds(proposed)
    missing, surplus = proposed_kinds - current_kinds, current_kinds - proposed_kinds
    if any(pool.per_cell for pool in (*current, *proposed)):
        # Cells are tied to nodes, so nobody moves between their pools.
        return sum(missing.values())
    return sum((_forget_role(missing) - _forget_role(surplus)).values())


def count_kinds(pools: Sequence[PlannedPool]) -> Counter[tuple[object, ...]]:
    """Instances by all that makes one need other pods than another."""
    kinds: Counter[tuple[object, ...]] = Counter()
    for pool in pools:
        kinds[pool.role, *_hardware(pool), _limits(pool)] += pool.replicas
    return kinds


def spare(current: Pools, proposed: Pools, serves: Callable[[Pools, int], bool]) -> Pools:
    """`proposed` with limits of `current` in as many pools as spares most starts.

    `serves`: whether such pools will do, and how many starts they spare.
    """
    max_starts = count_begun(current, proposed)
    variants = sorted(
        _list_variants(current, proposed), key=lambda pools: count_begun(current, pools)
    )
    for pools in variants:
        spared = max_starts - count_begun(current, pools)
        if spared > 0 and serves(pools, spared):
            return pools
    return proposed


def _list_variants(current: Pools, proposed: Pools) -> Iterator[Pools]:
    """Each pool with its own limits, or with those of running instances that might be its own."""
    options = [
        [pool, *(_limited(pool, each) for each in current if _hardware(each) == _hardware(pool))]
        for pool in proposed
    ]
    return (tuple(pools) for pools in itertools.product(*options))


def _limited(pool: PlannedPool, existing: PlannedPool) -> PlannedPool:
    seqs, tokens = _limits(existing)
    return replace(pool, max_num_seqs=seqs, max_num_batched_tokens=tokens)


def _hardware(pool: PlannedPool) -> tuple[object, ...]:
    gpu = None if pool.gpu == EMULATED_GPU else pool.gpu
    return gpu, pool.parallelism.tensor, pool.parallelism.pipeline


def _limits(pool: PlannedPool) -> tuple[int | None, int | None]:
    return pool.max_num_seqs, pool.max_num_batched_tokens


def _forget_role(instances: Counter[tuple[object, ...]]) -> Counter[tuple[object, ...]]:
    """Prefill and decode instances that differ in nothing else are one kind."""
    kinds: Counter[tuple[object, ...]] = Counter()
    for (role, *rest), count in instances.items():
        kinds[role if role is Role.MIXED else None, *rest] += count
    return kinds
