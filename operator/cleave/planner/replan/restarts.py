"""Counts the instances that a change of plan restarts, and reduces their number. Pure.

Called by replanning. Engines get their step limits at start, so a plan with other limits replaces
instances that would serve as well with their current ones. What is hard: the best limits are rarely
much better, and the search, which does not know the running instances, picks among near equals at
random.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from cleave.api.role import Role
from cleave.planner.plan import EMULATED_GPU, PlannedPool

Pools = tuple[PlannedPool, ...]


def count_starts(current: Sequence[PlannedPool], proposed: Sequence[PlannedPool]) -> int:
    """Instances of `proposed` that have to be started; some of `current` only change their role."""
    current_kinds, proposed_kinds = count_kinds(current), count_kinds(proposed)
    missing, surplus = proposed_kinds - current_kinds, current_kinds - proposed_kinds
    if any(pool.per_cell for pool in (*current, *proposed)):
        # Cells are bound to nodes, so instances do not move between their pools.
        return sum(missing.values())
    return sum((_merge_roles(missing) - _merge_roles(surplus)).values())


def count_kinds(pools: Sequence[PlannedPool]) -> Counter[tuple[object, ...]]:
    """Number of instances by all properties that need different pods."""
    kinds: Counter[tuple[object, ...]] = Counter()
    for pool in pools:
        kinds[pool.role, *_get_hardware(pool), _get_limits(pool)] += pool.replicas
    return kinds


def reduce_restarts(current: Pools, proposed: Pools, serves: Callable[[Pools, int], bool]) -> Pools:
    """`proposed`, with limits of `current` in as many pools as avoids most restarts. `serves(pools,
    avoided)`: whether such pools serve well enough, given the restarts avoided."""
    max_starts = count_starts(current, proposed)
    # Each pool with its own limits, or with those of existing instances on the same hardware.
    variants = itertools.product(*(_list_limits(current, pool) for pool in proposed))
    counted = [(count_starts(current, pools), pools) for pools in variants]
    for starts, pools in sorted(counted, key=lambda variant: variant[0]):
        if starts < max_starts and serves(pools, max_starts - starts):
            return pools
    return proposed


def _list_limits(current: Pools, pool: PlannedPool) -> Iterator[PlannedPool]:
    yield pool
    for each in current:
        if _get_hardware(each) == _get_hardware(pool):
            seqs, tokens = _get_limits(each)
            yield replace(pool, max_num_seqs=seqs, max_num_batched_tokens=tokens)


def _get_hardware(pool: PlannedPool) -> tuple[object, ...]:
    gpu = None if pool.gpu == EMULATED_GPU else pool.gpu
    return gpu, pool.parallelism


def _get_limits(pool: PlannedPool) -> tuple[int | None, int | None]:
    return pool.max_num_seqs, pool.max_num_batched_tokens


def _merge_roles(instances: Counter[tuple[object, ...]]) -> Counter[tuple[object, ...]]:
    """Merge prefill and decode instances that differ in nothing else."""
    kinds: Counter[tuple[object, ...]] = Counter()
    for (role, *rest), count in instances.items():
        kinds[role if role is Role.MIXED else None, *rest] += count
    return kinds
