"""Which instances a change of plans starts anew, and how few it can do with."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cleave.api.role import Parallelism, Role
from cleave.planner.plan import EMULATED_GPU, PlannedPool
from cleave.planner.replan.restarts import count_kinds, count_starts, reduce_restarts

PREFILL = PlannedPool(Role.PREFILL, 4, max_num_seqs=256, max_num_batched_tokens=8192)
DECODE = PlannedPool(Role.DECODE, 1, max_num_seqs=64, max_num_batched_tokens=2048)
NOW = PREFILL, DECODE
THEN = (
    replace(PREFILL, replicas=2, max_num_batched_tokens=4096),
    replace(DECODE, replicas=3, max_num_seqs=1024),
)


def serve(*_: object) -> bool:
    return True


def limits(pools: tuple[PlannedPool, ...]) -> list[tuple[int | None, int | None]]:
    return [(pool.max_num_seqs, pool.max_num_batched_tokens) for pool in pools]


def test_other_limits_replace_every_instance() -> None:
    assert count_starts(NOW, THEN) == 5
    assert count_starts(NOW, NOW) == 0


def test_spare_prefill_instances_become_decode_ones_with_the_limits_they_have() -> None:
    reduced = reduce_restarts(NOW, THEN, serve)
    assert limits(reduced) == [(256, 8192), (256, 8192)]
    assert [pool.replicas for pool in reduced] == [2, 3]
    assert count_starts(NOW, reduced) == 1


def test_limits_that_do_not_serve_are_dropped() -> None:
    calls = []

    def serves(pools: tuple[PlannedPool, ...], spared: int) -> bool:
        calls.append((limits(pools), spared))
        return limits(pools)[1] == (1024, 2048)

    reduced = reduce_restarts(NOW, THEN, serves)
    assert limits(reduced) == [(256, 8192), (1024, 2048)]
    assert count_starts(NOW, reduced) == 3
    assert calls[0] == ([(256, 8192), (256, 8192)], 4), "who spares most is asked about first"
    assert reduce_restarts(NOW, THEN, lambda *_: False) == THEN


def test_other_hardware_keeps_no_limits() -> None:
    wider = tuple(replace(pool, parallelism=Parallelism(tensor=2)) for pool in THEN)
    assert reduce_restarts(NOW, wider, serve) == wider
    elsewhere = tuple(replace(pool, gpu="H100") for pool in THEN)
    assert reduce_restarts(NOW, elsewhere, serve) == elsewhere
    emulated = tuple(replace(pool, gpu=EMULATED_GPU) for pool in THEN)
    assert reduce_restarts(NOW, emulated, serve) != emulated


LIMITS = st.sampled_from([None, 64, 256, 1024])
ROLES = ((Role.PREFILL, Role.DECODE), (Role.MIXED,), tuple(Role))


@st.composite
def plans(draw: st.DrawFn) -> tuple[PlannedPool, ...]:
    return tuple(
        PlannedPool(
            role,
            draw(st.integers(1, 5)),
            max_num_seqs=draw(LIMITS),
            max_num_batched_tokens=draw(LIMITS),
        )
        for role in draw(st.sampled_from(ROLES))
    )


@given(plans(), plans())
def test_pools_stay_as_large_and_no_more_is_started(now, then) -> None:
    reduced = reduce_restarts(now, then, serve)
    assert [(pool.role, pool.replicas) for pool in reduced] == [(p.role, p.replicas) for p in then]
    assert count_starts(now, reduced) <= count_starts(now, then)
    grown = sum(pool.replicas for pool in then) - sum(pool.replicas for pool in now)
    assert count_starts(now, reduced) >= max(grown, 0)
    if count_kinds(now) == count_kinds(then):
        assert reduced == then
