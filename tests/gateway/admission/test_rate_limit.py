"""What a tenant may use, over time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.gateway.admission.rate_limit import Account, Bucket, Limits


def test_a_minutes_worth_may_be_used_at_once_and_fills_evenly() -> None:
    bucket = Bucket(60, 0.0)
    bucket.use(60, 0.0)
    assert bucket.find_wait_s(1, 0.0) == pytest.approx(1.0)
    assert bucket.find_wait_s(1, 1.0) == pytest.approx(0.0)
    assert bucket.find_wait_s(30, 10.0) == pytest.approx(20.0)


def test_more_than_a_minutes_worth_waits_for_a_full_bucket_not_for_ever() -> None:
    bucket = Bucket(60, 0.0)
    bucket.use(30, 0.0)
    assert bucket.find_wait_s(1_000, 0.0) == pytest.approx(30.0)
    assert bucket.find_wait_s(1_000, 30.0) == pytest.approx(0.0)


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 40)), max_size=60))
def test_never_more_than_the_allowance_and_a_minutes_worth(asked) -> None:
    bucket, now, used = Bucket(120, 0.0), 0.0, 0.0
    for pause, amount in asked:
        now += pause
        if not bucket.find_wait_s(amount, now):
            bucket.use(amount, now)
            used += amount
        assert used <= 120 + 2 * now + 1e-6


def test_requests_at_a_time_are_limited() -> None:
    account = Account(Limits(max_concurrent=2), 0.0)
    assert [account.enter(1, 0.0) for _ in range(2)] == [None, None]
    refusal = account.enter(1, 0.0)
    assert refusal is not None
    assert refusal.reason == "concurrency_limit"
    account.leave(0, 0.0)
    assert account.enter(1, 0.0) is None


def test_a_refusal_uses_nothing_up() -> None:
    account = Account(Limits(requests_per_minute=1, tokens_per_minute=100), 0.0)
    assert account.enter(10, 0.0) is None
    for _ in range(5):
        refusal = account.enter(10, 0.0)
        assert refusal is not None
        assert (refusal.reason, refusal.retry_after_s) == ("request_rate_limit", 60.0)
    assert account.running == 1
    assert account.enter(90, 60.0) is None


def test_tokens_of_answers_are_charged_when_they_are_known() -> None:
    account = Account(Limits(tokens_per_minute=60), 0.0)
    assert account.enter(10, 0.0) is None
    account.leave(110, 0.0)
    refusal = account.enter(1, 0.0)
    assert refusal is not None
    assert refusal.reason == "token_rate_limit"
    assert refusal.retry_after_s == pytest.approx(61.0)


def test_other_limits_count_from_now_on() -> None:
    account = Account(Limits(requests_per_minute=1), 0.0)
    assert account.enter(1, 0.0) is None
    account.change(Limits(), 0.0)
    assert account.enter(1, 0.0) is None
    account.change(Limits(max_concurrent=2), 0.0)
    assert account.enter(1, 0.0) is not None
