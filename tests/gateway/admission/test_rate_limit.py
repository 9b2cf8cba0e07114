"""What a tenant may use, over time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.gateway.admission.rate_limit import TenantLimits, TenantUsage, TokenBucket


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
