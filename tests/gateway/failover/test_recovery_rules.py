"""What is left after each failure, as values."""

from cleave.gateway.failover.retry_policy import (
    DECODE_BUDGET,
    PREFILL_BUDGET,
    Failure,
    FailureHistory,
)
from cleave.router.routing_request import CachedPrompt


def test_prefill_attempts_are_budgeted_then_one_instance_does_it_all() -> None:
    past = FailureHistory()
    assert [past.record_prefill_failure(f"p{i}") for i in range(PREFILL_BUDGET + 1)] == [
        True,
        True,
        False,
    ]
    assert past.prefers_colocated
    assert past.excluded == {"p0", "p1", "p2"}


def test_decode_attempts_are_budgeted() -> None:
    past = FailureHistory()
    left = [
        past.record_decode_failure(f"d{i}", Failure.LOST, True) for i in range(DECODE_BUDGET + 1)
    ]
    assert left == [True, True, False]


def test_engines_that_were_not_reached_cost_no_decode_attempt() -> None:
    past = FailureHistory()
    assert all(past.record_decode_failure(f"d{i}", Failure.UNREACHED, True) for i in range(20))
    assert len(past.excluded) == 20
    assert past.record_decode_failure("d", Failure.LOST, True)


def test_a_lost_instance_is_avoided_and_one_that_refused_only_doubted() -> None:
    past = FailureHistory()
    past.record_decode_failure("gone", Failure.LOST, True)
    past.record_decode_failure("hung", Failure.TIMEOUT, True)
    past.record_decode_failure("refused", Failure.STATUS, True)
    assert (past.excluded, past.suspects) == ({"gone", "hung"}, {"refused"})


def test_only_a_refused_hand_off_calls_for_one_instance() -> None:
    past = FailureHistory()
    past.record_decode_failure("d", Failure.STATUS, disaggregated=False)
    past.record_decode_failure("d", Failure.LOST, disaggregated=True)
    assert not past.prefers_colocated
    past.record_decode_failure("d", Failure.STATUS, disaggregated=True)
    assert past.prefers_colocated


def test_a_prompt_is_known_to_be_cached_unless_its_hand_off_may_be_to_blame() -> None:
    for failure in (Failure.STATUS, Failure.HANDOFF, Failure.TIMEOUT):
        past = FailureHistory()
        past.record_cached_prompt("p-boot", 7, failure)
        assert past.cached is None
    past.record_cached_prompt("p-boot", 7, Failure.LOST)
    assert past.cached == CachedPrompt("p-boot", 7)
    past.reset_budget()
    assert past.cached is not None, "it is still there when another engine is lost"
