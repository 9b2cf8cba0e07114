"""Which connections a full limiter closes, and for whom."""

import logging
import math

import pytest

from cleave.gateway.http.connection_limiter import (
    MAX_EXAMINED,
    ConnectionLimiter,
    get_address_group,
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Fake:
    """Idle since a time; infinite: never."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.dropped = False

    def get_idle_since(self) -> float:
        return self.since

    def drop(self) -> None:
        self.dropped = True


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limiter(clock: Clock) -> ConnectionLimiter:
    return ConnectionLimiter("clients", 4, clock)


def connect(limiter: ConnectionLimiter, address: str, *since: float) -> list[Fake]:
    connections = [Fake(each) for each in since]
    for one in connections:
        assert limiter.admit(one, address)
    return connections


def test_with_room_an_address_may_have_all(limiter: ConnectionLimiter) -> None:
    assert not any(one.dropped for one in connect(limiter, "1.1.1.1", 1, 2, 3, 4))
    assert len(limiter) == 4


def test_the_one_that_is_idle_longest_makes_room(limiter: ConnectionLimiter) -> None:
    first = connect(limiter, "1.1.1.1", 1, 2, 3, 4)
    connect(limiter, "1.1.1.1", 5, 6)
    assert [one.dropped for one in first] == [True, True, False, False]
    assert len(limiter) == 4


def test_a_connection_that_has_been_active_goes_after_the_idle_ones(
    limiter: ConnectionLimiter,
) -> None:
    first = connect(limiter, "1.1.1.1", 1, 2, 3, 4)
    first[0].since = first[2].since = 5
    connect(limiter, "1.1.1.1", 6, 7)
    assert [one.dropped for one in first] == [False, True, False, True]


def test_the_address_with_most_gives_way_before_others(limiter: ConnectionLimiter) -> None:
    (other,) = connect(limiter, "2.2.2.2", 0)
    many = connect(limiter, "1.1.1.1", 1, 2, 3)
    connect(limiter, "3.3.3.3", 9, 9)
    assert not other.dropped
    assert [one.dropped for one in many] == [True, True, False]


def test_an_address_whose_connections_are_all_busy_is_passed_over(
    limiter: ConnectionLimiter,
) -> None:
    busy = connect(limiter, "1.1.1.1", math.inf, math.inf, math.inf)
    (idle,) = connect(limiter, "2.2.2.2", 1)
    connect(limiter, "3.3.3.3", 2)
    assert idle.dropped
    assert not any(one.dropped for one in busy)


def test_a_busy_connection_is_never_closed(limiter: ConnectionLimiter) -> None:
    running = connect(limiter, "1.1.1.1", *[math.inf] * 4)
    assert not limiter.admit(Fake(1), "2.2.2.2")
    assert not any(one.dropped for one in running)
    running[2].since = 50
    connect(limiter, "2.2.2.2", 1)
    assert [one.dropped for one in running] == [False, False, True, False]


def test_who_has_left_leaves_room(limiter: ConnectionLimiter) -> None:
    first = connect(limiter, "1.1.1.1", 1, 2, 3, 4)
    limiter.remove(first[3])
    limiter.remove(first[3])
    connect(limiter, "1.1.1.1", 5)
    assert not any(one.dropped for one in first)


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("addresses", [1, 64, 1_024])
def test_a_new_connection_costs_the_same_however_many_are_open(
    clock: Clock, busy: bool, addresses: int
) -> None:
    examined = 0

    class Counted(Fake):
        def get_idle_since(self) -> float:
            nonlocal examined
            examined += 1
            return super().get_idle_since()

    limiter = ConnectionLimiter("clients", 1_024, clock)
    most = 0
    for i in range(4_096):
        examined = 0
        since = math.inf if busy and i < 1_024 else i
        limiter.admit(Counted(since), f"address {i % addresses}")
        most = max(most, examined)
    assert most <= MAX_EXAMINED + 17  # 16 of the last address, one stamp of the new connection
    assert len(limiter) == 1_024


def test_a_full_port_is_logged_once_a_minute(
    limiter: ConnectionLimiter, clock: Clock, caplog
) -> None:
    with caplog.at_level(logging.WARNING):
        connect(limiter, "1.1.1.1", *range(10))
        clock.now += 61
        connect(limiter, "1.1.1.1", 10)
    assert len(caplog.records) == 2
    assert caplog.records[0].getMessage().startswith("4 clients, as many as")


@pytest.mark.parametrize(
    ("address", "counted"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:0:1::5", get_address_group(("2001:db8:0:1:ffff::1", 1, 0, 0))),
        ("fe80::1%eth0", get_address_group(("fe80::2", 1, 0, 0))),
    ],
)
def test_a_machine_is_one_address(address: str, counted: str) -> None:
    assert get_address_group((address, 1)) == counted


def test_networks_are_distinguished() -> None:
    assert get_address_group(("2001:db8:0:1::5", 1)) != get_address_group(("2001:db8:0:2::5", 1))
    assert get_address_group(None) == get_address_group("") == ""
