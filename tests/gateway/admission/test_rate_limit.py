"""What a tenant may use, over time and over all processes of a gateway."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.gateway.admission.rate_limit import (
    SharedTenantUsage,
    TenantLimits,
    TenantUsage,
    TokenBucket,
)
from cleave.shm.table import SharedTable


def test_a_minutes_worth_may_be_used_at_once_and_fills_evenly() -> None:
    bucket = TokenBucket(60, 0.0)
    bucket.consume(60, 0.0)
    assert bucket.compute_wait_s(1, 0.0) == pytest.approx(1.0)
    assert bucket.compute_wait_s(1, 1.0) == pytest.approx(0.0)
    assert bucket.compute_wait_s(30, 10.0) == pytest.approx(20.0)


def test_more_than_a_minutes_worth_waits_for_a_full_bucket_not_for_ever() -> None:
    bucket = TokenBucket(60, 0.0)
    bucket.consume(30, 0.0)
    assert bucket.compute_wait_s(1_000, 0.0) == pytest.approx(30.0)
    assert bucket.compute_wait_s(1_000, 30.0) == pytest.approx(0.0)


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 40)), max_size=60))
def test_never_more_than_the_allowance_and_a_minutes_worth(requests) -> None:
    bucket, now, used = TokenBucket(120, 0.0), 0.0, 0.0
    for pause, amount in requests:
        now += pause
        if not bucket.compute_wait_s(amount, now):
            bucket.consume(amount, now)
            used += amount
        assert used <= 120 + 2 * now + 1e-6


def test_requests_at_a_time_are_limited() -> None:
    usage = TenantUsage(TenantLimits(max_concurrent=2), 0.0)
    assert [usage.acquire(1, 0.0) for _ in range(2)] == [None, None]
    refusal = usage.acquire(1, 0.0)
    assert refusal is not None
    assert refusal.reason == "concurrency_limit"
    usage.release(0, 0.0)
    assert usage.acquire(1, 0.0) is None


def test_a_refusal_uses_nothing_up() -> None:
    usage = TenantUsage(TenantLimits(requests_per_minute=1, tokens_per_minute=100), 0.0)
    assert usage.acquire(10, 0.0) is None
    for _ in range(5):
        refusal = usage.acquire(10, 0.0)
        assert refusal is not None
        assert (refusal.reason, refusal.retry_after_s) == ("request_rate_limit", 60.0)
    assert usage.num_running == 1
    assert usage.acquire(90, 60.0) is None


def test_tokens_of_answers_are_charged_when_they_are_known() -> None:
    usage = TenantUsage(TenantLimits(tokens_per_minute=60), 0.0)
    assert usage.acquire(10, 0.0) is None
    usage.release(110, 0.0)
    refusal = usage.acquire(1, 0.0)
    assert refusal is not None
    assert refusal.reason == "token_rate_limit"
    assert refusal.retry_after_s == pytest.approx(61.0)


def test_other_limits_count_from_now_on() -> None:
    usage = TenantUsage(TenantLimits(requests_per_minute=1), 0.0)
    assert usage.acquire(1, 0.0) is None
    usage.set_limits(TenantLimits(), 0.0)
    assert usage.acquire(1, 0.0) is None
    usage.set_limits(TenantLimits(max_concurrent=2), 0.0)
    assert usage.acquire(1, 0.0) is not None


@pytest.fixture
def table() -> Iterator[SharedTable]:
    made = SharedTable(2, 2, own=1, common=4)
    yield made
    made.close()


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
