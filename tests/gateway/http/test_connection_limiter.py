"""Which connections a full limiter closes, and for whom; and that memory is never exceeded."""

import logging
import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cleave.gateway.http.buffer_budget import BufferBudget
from cleave.gateway.http.connection_limiter import (
    MAX_EXAMINED,
    STALLED_S,
    UNIT_BYTES,
    ConnectionLimiter,
    get_address_group,
)

KIB = 1 << 10
PLAIN, TLS = 4 * KIB, 40 * KIB
LIMIT = 400 * KIB


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Fake:
    """Idle since a time; infinite: never."""

    def __init__(self, since: float, receives: bool = False) -> None:
        self.since = since
        self.receives = receives
        self.dropped = self.expected = False

    def get_idle_since(self) -> float:
        return self.since

    def is_receiving(self) -> bool:
        return self.receives

    def is_expected(self) -> bool:
        return self.expected

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
        assert limiter.admit(one, address, PLAIN)
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
    assert not limiter.admit(Fake(1), "2.2.2.2", 1)
    assert not any(one.dropped for one in running)
    running[2].since = 50
    connect(limiter, "2.2.2.2", 1)
    assert [one.dropped for one in running] == [False, False, True, False]


def test_a_known_client_goes_before_addresses_that_take_less(limiter: ConnectionLimiter) -> None:
    own = connect(limiter, "2.2.2.2", math.inf, math.inf)
    others = [connect(limiter, f"1.1.1.{n}", n)[0] for n in range(2)]
    assert not limiter.admit(Fake(9), "2.2.2.2", PLAIN)
    assert limiter.admit(Fake(9), "2.2.2.2", PLAIN, is_known=True)
    assert [one.dropped for one in others] == [True, False]
    assert not any(one.dropped for one in own)


def test_one_whose_request_is_expected_is_closed_once_it_is_not(limiter: ConnectionLimiter) -> None:
    awaited = [Fake(number) for number in range(4)]
    for one in awaited:
        one.expected = True
        assert limiter.admit(one, "1.1.1.1", PLAIN)
    assert not limiter.admit(Fake(1), "2.2.2.2", PLAIN, is_known=True)
    for one in awaited:
        one.expected = False
    assert limiter.admit(Fake(1), "2.2.2.2", PLAIN), "at the first look"
    assert sum(one.dropped for one in awaited) == 1


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
        limiter.admit(Counted(since), f"address {i % addresses}", KIB)
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
    assert caplog.records[0].getMessage().startswith("4 clients take 0 MiB, as much as")


# --- memory ---


@pytest.fixture
def budget() -> BufferBudget:
    """1,200 KiB for all, of which 800 KiB for requests and answers."""
    return BufferBudget(800 * KIB)


@pytest.fixture
def weighed(clock: Clock, budget: BufferBudget) -> ConnectionLimiter:
    limiter = ConnectionLimiter("clients", 1_000, clock, budget=budget)
    budget.close_idle = limiter.close_one
    return limiter


def open_many(
    limiter: ConnectionLimiter, address: str, count: int, weight: int, since: float = 1
) -> list[Fake]:
    connections = [Fake(since) for _ in range(count)]
    return [one for one in connections if limiter.admit(one, address, weight)]


def test_there_are_as_many_connections_as_their_memory_allows(weighed, budget) -> None:
    plain = open_many(weighed, "1.1.1.1", 900, PLAIN)
    assert sum(not one.dropped for one in plain) == 300
    assert len(open_many(weighed, "2.2.2.2", 5, TLS)) == 5
    assert sum(not one.dropped for one in plain) == 250
    assert budget.connection_bytes == 1_200 * KIB


def test_one_address_cannot_push_out_others_by_connections_or_bodies(weighed) -> None:
    others = [open_many(weighed, f"10.0.0.{n}", 10, PLAIN)[0] for n in range(20)]
    assert len(open_many(weighed, "6.6.6.6", 500, PLAIN)) == 500
    assert not any(one.dropped for one in others)
    (body,) = open_many(weighed, "6.6.6.6", 1, PLAIN, math.inf)
    assert not weighed.resize(body, 500 * KIB), "its own idle ones do not suffice"
    assert not any(one.dropped for one in others)
    assert not body.dropped


def test_a_body_closes_idle_connections_but_no_other_body_of_its_address(weighed) -> None:
    first, second = Fake(1, receives=True), Fake(2, receives=True)
    for each in (first, second):
        assert weighed.admit(each, "1.1.1.1", PLAIN)
    assert weighed.resize(first, 500 * KIB)
    idle = open_many(weighed, "1.1.1.1", 170, PLAIN)
    assert weighed.resize(second, 100 * KIB)
    assert sum(one.dropped for one in idle) == 22
    for one in idle:
        one.since = math.inf
    assert not weighed.resize(second, 300 * KIB)
    assert not first.dropped


def test_a_gateway_full_of_bodies_closes_nothing_for_another_and_takes_connections(
    weighed, budget
) -> None:
    bodies = open_many(weighed, "1.1.1.1", 2, PLAIN, math.inf)
    assert weighed.resize(bodies[0], 800 * KIB)
    idle = open_many(weighed, "1.1.1.1", 50, PLAIN)
    assert not weighed.resize(bodies[1], 1)
    assert not budget.reserve(1)
    assert not any(one.dropped for one in idle)
    assert open_many(weighed, "2.2.2.2", 1, TLS)
    assert not any(one.dropped for one in idle)


@pytest.mark.parametrize("is_answer", [False, True])
def test_a_gateway_full_of_parts_of_requests_closes_those_that_came_long_ago(
    weighed, budget, clock, is_answer: bool
) -> None:
    """Of the address that takes most. Those of the last seconds may be requests of anyone."""
    parts = open_many(weighed, "1.1.1.1", 8, PLAIN, since=clock.now)
    (other,) = open_many(weighed, "2.2.2.2", 1, PLAIN, since=clock.now)
    for each in parts:
        each.receives = True
        assert weighed.resize(each, 100 * KIB)

    def ask() -> bool:
        return budget.reserve(50 * KIB) if is_answer else weighed.resize(other, 50 * KIB)

    assert not ask()
    clock.now += 1.1 * STALLED_S
    assert ask()
    assert [each.dropped for each in parts] == [True] + [False] * 7
    assert not other.dropped


def test_bodies_and_answers_of_all_others_close_idle_connections(weighed, budget) -> None:
    idle = open_many(weighed, "1.1.1.1", 300, PLAIN)
    assert budget.reserve(100 * KIB)
    assert sum(one.dropped for one in idle) == 25
    assert not budget.reserve(701 * KIB)
    assert sum(one.dropped for one in idle) == 25
    assert budget.used == 100 * KIB


def test_clients_that_do_not_read_are_closed_after_idle_ones(weighed, budget) -> None:
    (idle,) = open_many(weighed, "1.1.1.1", 1, PLAIN)
    (blocked,) = open_many(weighed, "2.2.2.2", 1, PLAIN, math.inf)
    budget.add_blocked(blocked, 790 * KIB)
    open_many(weighed, "1.1.1.1", 100, PLAIN, math.inf)
    assert open_many(weighed, "3.3.3.3", 1, 5 * KIB)
    assert idle.dropped
    assert not blocked.dropped
    assert not budget.reserve(801 * KIB)
    assert budget.reserve(700 * KIB)
    assert blocked.dropped


def test_a_share_limits_a_kind(clock) -> None:
    limiter = ConnectionLimiter("TLS handshakes", 100, clock, max_bytes=64 * KIB)
    silent = open_many(limiter, "1.1.1.1", 16, PLAIN)
    assert limiter.update_weight(silent[3], TLS)
    assert sum(one.dropped for one in silent) == 9
    assert not silent[3].dropped
    assert not limiter.update_weight(silent[0], TLS), "it has gone"


def test_a_known_one_grows_beyond_those_that_fill_the_share_with_less_each(clock) -> None:
    limiter = ConnectionLimiter("TLS handshakes", 100, clock, max_bytes=64 * KIB)
    others = [open_many(limiter, f"1.1.1.{n}", 1, PLAIN)[0] for n in range(15)]
    (known,) = open_many(limiter, "2.2.2.2", 1, PLAIN)
    assert not limiter.update_weight(known, TLS), "each of the others takes less than it would"
    assert limiter.update_weight(known, TLS, is_known=True)
    assert not known.dropped
    assert sum(one.dropped for one in others) == 9


def test_a_connection_that_goes_frees_all_it_took(weighed, budget) -> None:
    (one,) = open_many(weighed, "1.1.1.1", 1, TLS)
    assert weighed.resize(one, 100 * KIB)
    assert (budget.connection_bytes, budget.used) == (TLS, 100 * KIB)
    weighed.remove(one)
    assert weighed.resize(one, 0)
    assert not weighed.resize(one, 1)
    assert (budget.connection_bytes, budget.used) == (0, 0)
    assert not weighed._address_bytes
    assert not len(weighed._ranked)


class Limited(RuleBasedStateMachine):
    """Any connections, bodies and answers: memory is never exceeded, and all counts agree."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.budget = BufferBudget(LIMIT)
        self.limiter = ConnectionLimiter("clients", 60, self.clock, budget=self.budget)
        self.budget.close_idle = self.limiter.close_one
        self.open: dict[Fake, list] = {}
        self.answers: list[int] = []

    addresses = st.sampled_from(["a", "b", "c"])
    places = st.integers(0, 1_000)

    def pick(self, place: int) -> Fake | None:
        self.forget_dropped()
        return list(self.open)[place % len(self.open)] if self.open else None

    def forget_dropped(self) -> None:
        self.open = {one: kept for one, kept in self.open.items() if not one.dropped}

    @rule(address=addresses, weight=st.sampled_from([PLAIN, TLS]), busy=st.booleans())
    def connect(self, address: str, weight: int, busy: bool) -> None:
        self.clock.now += 1
        one = Fake(math.inf if busy else self.clock.now)
        if self.limiter.admit(one, address, weight):
            self.open[one] = [address, weight, 0]

    @rule(place=places, size=st.integers(0, 300 * KIB))
    def resize(self, place: int, size: int) -> None:
        one = self.pick(place)
        if one is not None and self.limiter.resize(one, size):
            self.open[one][2] = size

    @rule(place=places, weight=st.sampled_from([PLAIN, TLS]))
    def update_weight(self, place: int, weight: int) -> None:
        one = self.pick(place)
        if one is not None and self.limiter.update_weight(one, weight):
            self.open[one][1] = weight

    @rule(place=places, busy=st.booleans(), receives=st.booleans())
    def become(self, place: int, busy: bool, receives: bool) -> None:
        if (one := self.pick(place)) is not None:
            self.clock.now += 1
            one.since, one.receives = math.inf if busy else self.clock.now, receives

    @rule(place=places)
    def leave(self, place: int) -> None:
        if (one := self.pick(place)) is not None:
            self.limiter.remove(one)
            del self.open[one]

    @rule(size=st.integers(1, 300 * KIB))
    def answer(self, size: int) -> None:
        if self.budget.reserve(size):
            self.answers.append(size)

    @rule()
    def finish_answer(self) -> None:
        if self.answers:
            self.budget.release(self.answers.pop())

    @invariant()
    def memory_is_not_exceeded(self) -> None:
        self.forget_dropped()
        weights = sum(weight for _, weight, _ in self.open.values())
        buffered = sum(size for *_, size in self.open.values())
        assert self.budget.connection_bytes == weights == self.limiter._bytes
        assert self.budget.used == buffered + sum(self.answers)
        assert self.budget.used <= LIMIT
        assert weights + self.budget.used <= LIMIT + LIMIT // 2
        assert len(self.limiter) == len(self.open) <= 60
        by_address: dict[str, int] = {}
        for address, weight, size in self.open.values():
            by_address[address] = by_address.get(address, 0) + weight + size
        assert self.limiter._address_bytes == by_address
        assert self.limiter._ranked._ranks == {
            a: -size // UNIT_BYTES for a, size in by_address.items()
        }


TestLimited = Limited.TestCase
TestLimited.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


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
