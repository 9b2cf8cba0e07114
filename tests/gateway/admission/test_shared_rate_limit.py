"""Tenants' limits hold for all processes of a gateway together."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.gateway.admission.rate_limit import TenantLimits, TenantUsage
from cleave.gateway.admission.shared_rate_limit import SharedTenantUsage
from cleave.shm.table import SharedTable


@pytest.fixture
def table() -> Iterator[SharedTable]:
    new_table = SharedTable(2, 2, own=1, common=4)
    yield new_table
    new_table.close()


def open_all(table: SharedTable, limits: TenantLimits, now: float = 1.0) -> list[SharedTenantUsage]:
    views = [table.for_process(process) for process in range(2)]
    return [SharedTenantUsage(one, one.claim(b"tenant"), limits, now) for one in views]


def test_requests_at_a_time_are_counted_over_all_processes(table) -> None:
    first, second = open_all(table, TenantLimits(max_concurrent=3))
    assert [first.acquire(1, 1.0), second.acquire(1, 1.0), second.acquire(1, 1.0)] == [None] * 3
    assert first.acquire(1, 1.0).reason == "concurrency_limit"
    second.release(1, 1.0)
    assert first.acquire(1, 1.0) is None
    assert (first.num_running, second.num_running) == (2, 1)


def test_what_a_dead_process_ran_counts_no_more(table) -> None:
    first, second = open_all(table, TenantLimits(max_concurrent=2))
    assert [first.acquire(1, 1.0), first.acquire(1, 1.0)] == [None] * 2
    table.clear_process(0)
    assert [second.acquire(1, 1.0), second.acquire(1, 1.0)] == [None] * 2
    assert second.acquire(1, 1.0) is not None


def test_a_process_that_comes_later_finds_what_the_others_have_used(table) -> None:
    limits = TenantLimits(requests_per_minute=2, tokens_per_minute=1000)
    first, _ = open_all(table, limits)
    assert [first.acquire(10, 1.0), first.acquire(10, 1.0)] == [None] * 2
    late, _ = open_all(table, limits, now=2.0)
    assert late.acquire(10, 2.0).reason == "request_rate_limit"


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 1), st.integers(1, 400), st.floats(0, 5), st.booleans()),
        max_size=40,
    )
)
def test_together_they_admit_what_one_would(steps) -> None:
    """Wherever each request comes in."""
    table = SharedTable(2, 2, own=1, common=4)
    limits = TenantLimits(requests_per_minute=20, tokens_per_minute=2000, max_concurrent=6)
    together, alone, now = open_all(table, limits), TenantUsage(limits, 1.0), 1.0
    running = [0, 0]
    for process, tokens, wait_s, leaves in steps:
        now += wait_s
        if leaves and running[process]:
            running[process] -= 1
            together[process].release(tokens, now)
            alone.release(tokens, now)
            continue
        refusal = together[process].acquire(tokens, now)
        assert refusal == alone.acquire(tokens, now)
        running[process] += refusal is None
    table.close()
