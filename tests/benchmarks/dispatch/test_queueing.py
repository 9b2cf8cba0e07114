"""The queues of the benchmark against what theory knows."""

import goodput
import numpy as np
import pytest
import queueing
from queueing import Way


def delay(
    way: Way, *, instances: int = 4, gateways: int = 1, load: float = 0.8, error: float = 0.0
) -> float:
    lengths = np.array([200, 400, 3_000])
    drawn = queueing.draw_load(
        lengths, instances=instances, utilisation=load, requests=40_000, seed=3, error=error
    )
    return queueing.measure(drawn, instances=instances, gateways=gateways, way=way, seed=3).mean


def test_one_instance_waits_as_an_m_d_1_queue_says() -> None:
    drawn = queueing.draw_load(
        np.array([900]), instances=1, utilisation=0.7, requests=200_000, seed=5
    )
    found = queueing.measure(drawn, instances=1, gateways=1, way=Way.RANDOM, seed=5).mean
    assert found == pytest.approx(100 * 0.7 / (2 * (1 - 0.7)), rel=0.03)


def test_nothing_waits_less_than_the_bound() -> None:
    bound = delay(Way.BOUND)
    assert all(delay(way) >= bound for way in Way)


def test_the_better_a_way_knows_the_queues_the_less_is_waited() -> None:
    ways = (Way.EARLIEST, Way.PENDING_TOKENS, Way.POWER_OF_TWO, Way.ROUND_ROBIN, Way.RANDOM)
    delays = [delay(way) for way in ways]
    assert delays == sorted(delays)


@pytest.mark.parametrize(("instances", "load"), [(4, 0.5), (32, 0.8), (32, 0.95)])
def test_the_default_waits_as_little_as_who_knows_everything(instances: int, load: float) -> None:
    bound = delay(Way.BOUND, instances=instances, load=load)
    assert delay(Way.EARLIEST, instances=instances, load=load) <= 1.03 * bound


def test_with_mistaken_lengths_a_margin_and_the_time_of_each_prompt_spare_waiting() -> None:
    ways = (Way.EARLIEST, Way.BY_TOKENS)
    careful, plain = (delay(way, instances=32, load=0.9, error=0.2) for way in ways)
    assert careful < 0.97 * plain


def test_gateways_that_share_instances_out_wait_less_than_those_that_do_not() -> None:
    apart = {way: delay(way, instances=32, gateways=4) for way in (Way.EARLIEST, Way.HOME)}
    assert apart[Way.HOME] < apart[Way.EARLIEST] / 2


@pytest.mark.parametrize("limit", [0.003, 0.4, 1.0, 37.0])
def test_the_highest_rate_that_holds_is_found(limit: float) -> None:
    assert goodput.bisect(lambda rate: rate <= limit) == pytest.approx(limit, rel=0.011)
    assert goodput.bisect(lambda rate: False) == 0
