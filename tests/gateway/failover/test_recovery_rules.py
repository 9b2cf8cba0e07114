"""What is left after each failure, as values."""

from cleave.gateway.failover.retry_policy import DECODE_BUDGET, PREFILL_BUDGET, Failure, Recovery
from cleave.router.selection import Cached


def test_prefill_attempts_are_budgeted_then_one_instance_does_it_all() -> None:
    past = Recovery()
    assert [past.note_prefill(f"p{i}") for i in range(PREFILL_BUDGET + 1)] == [True, True, False]
    assert past.whole
    assert past.avoid == {"p0", "p1", "p2"}


def test_decode_attempts_are_budgeted() -> None:
    past = Recovery()
    left = [past.note_decode(f"d{i}", Failure.LOST, True) for i in range(DECODE_BUDGET + 1)]
    assert left == [True, True, False]


def test_engines_that_were_not_reached_cost_no_decode_attempt() -> None:
    past = Recovery()
    assert all(past.note_decode(f"d{i}", Failure.UNREACHED, True) for i in range(20))
    assert len(past.avoid) == 20
    assert past.note_decode("d", Failure.LOST, True)


def test_a_lost_instance_is_avoided_and_one_that_refused_only_doubted() -> None:
    past = Recovery()
    past.note_decode("gone", Failure.LOST, True)
    past.note_decode("hung", Failure.TIMEOUT, True)
    past.note_decode("refused", Failure.STATUS, True)
    assert (past.avoid, past.doubted) == ({"gone", "hung"}, {"refused"})


def test_only_a_refused_hand_off_calls_for_one_instance() -> None:
    past = Recovery()
    past.note_decode("d", Failure.STATUS, split=False)
    past.note_decode("d", Failure.LOST, split=True)
    assert not past.whole
    past.note_decode("d", Failure.STATUS, split=True)
    assert past.whole


def test_a_prompt_is_known_to_be_cached_unless_its_hand_off_may_be_to_blame() -> None:
    for failure in (Failure.STATUS, Failure.HANDOFF, Failure.TIMEOUT):
        past = Recovery()
        past.note_prompt("p-boot", 7, failure)
        assert past.cached is None
    past.note_prompt("p-boot", 7, Failure.LOST)
    assert past.cached == Cached("p-boot", 7)
    past.renew()
    assert past.cached is not None, "it is still there when another engine is lost"
