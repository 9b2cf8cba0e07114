"""How many requests of a batch are sent at a time."""

import random

import pytest

from cleave.batch.pacer import INITIAL_LIMIT, MAX_DELAY_S, SPREAD, Pacer


def make_pacer(max_running: int = 100) -> Pacer:
    return Pacer(max_running, random.Random(1))


def test_twice_as_many_are_sent_after_a_round_until_one_is_refused() -> None:
    pacer = make_pacer()
    for _ in range(int(INITIAL_LIMIT)):
        pacer.grow()
    assert pacer.limit == 2 * INITIAL_LIMIT


def test_after_a_refusal_one_more_is_sent_after_each_round_of_answers() -> None:
    pacer = make_pacer()
    pacer.reduce(1.0, 2.0, retry_after_s=1.0)
    before = pacer.limit
    for _ in range(int(before)):
        pacer.start()
        pacer.finish()
        pacer.grow()
    assert before + 0.8 < pacer.limit <= before + 1


def test_the_limit_of_the_user_holds() -> None:
    pacer = make_pacer(max_running=3)
    for _ in range(100):
        pacer.grow()
    while pacer.may_start(0.0):
        pacer.start()
    assert pacer.num_running == 3


def test_refusals_of_one_round_halve_the_number_once() -> None:
    pacer = make_pacer()
    for _ in range(int(INITIAL_LIMIT)):
        pacer.reduce(1.0, 2.0, retry_after_s=1.0)
    assert pacer.limit == INITIAL_LIMIT / 2
    pacer.reduce(3.0, 4.0, retry_after_s=1.0)
    assert pacer.limit == INITIAL_LIMIT / 4


def test_one_request_is_always_tried() -> None:
    pacer = make_pacer()
    for second in range(20):
        pacer.reduce(second, second + 0.5, retry_after_s=1.0)
    assert pacer.limit == 1.0
    assert pacer.may_start(1_000.0)


@pytest.mark.parametrize("retry_after_s", [1.0, 5.0, 1_000.0])
def test_no_request_is_sent_before_the_gateway_asks_for_it(retry_after_s) -> None:
    pacer = make_pacer()
    delay_s = pacer.reduce(1.0, 2.0, retry_after_s)
    least = min(retry_after_s, MAX_DELAY_S)
    assert least <= delay_s <= least * (1 + SPREAD)
    assert not pacer.may_start(2.0 + least * 0.99)
    assert pacer.may_start(2.0 + delay_s)


def test_without_a_request_for_a_delay_it_doubles_up_to_a_bound() -> None:
    pacer = make_pacer()
    delays = [pacer.reduce(at, at + 0.5, None) for at in range(10)]
    assert all(2**n <= delay <= 2**n * (1 + SPREAD) for n, delay in enumerate(delays[:6]))
    assert max(delays) <= MAX_DELAY_S * (1 + SPREAD)
    pacer.grow()
    assert pacer.reduce(20.0, 21.0, None) <= 1 + SPREAD
