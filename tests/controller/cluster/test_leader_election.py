"""The election: one writes at a time, and another takes over when it falls silent."""

import copy
from typing import Any

import pytest

from cleave.controller.cluster.client import KubeApiError
from cleave.controller.cluster.leader_election import LeaderElector, LeaseConfig
from cleave.manifests.labels import Manifest

from tests.support.doubles import Clock


class Leases:
    """The API server as far as one Lease goes."""

    def __init__(self) -> None:
        self.lease: Manifest | None = None
        self.down = False
        self.writes = 0

    async def get(self, _kind: str, _namespace: str, _name: str, **_: Any) -> Manifest:
        self._must_be_up()
        if self.lease is None:
            raise KubeApiError(404, "NotFound", "no lease")
        return copy.deepcopy(self.lease)

    async def request(self, method: str, _path: str, *, body: Manifest, **_: Any) -> Manifest:
        self._must_be_up()
        version = body["metadata"].get("resourceVersion")
        known = self.lease["metadata"]["resourceVersion"] if self.lease else None
        if (method == "POST") != (self.lease is None) or version != known:
            raise KubeApiError(409, "Conflict", "changed")
        self.writes += 1
        meta = {**body["metadata"], "resourceVersion": str(self.writes)}
        self.lease = copy.deepcopy({**body, "metadata": meta})
        return self.lease

    def _must_be_up(self) -> None:
        if self.down:
            raise KubeApiError(0, "Unreachable", "down")


@pytest.fixture
def leases() -> Leases:
    return Leases()


def candidate(name: str, leases: Leases, clock: Clock) -> LeaderElector:
    return LeaderElector(leases, "cleave", "operator", name, clock=clock)  # type: ignore[arg-type]


async def test_the_first_one_leads_and_the_second_waits(leases: Leases, clock: Clock) -> None:
    one, two = (candidate(name, leases, clock) for name in ("one", "two"))
    await one._try_acquire()
    await two._try_acquire()
    assert (one.is_leading, two.is_leading) == (True, False)
    assert one.elected.is_set()
    assert leases.lease
    assert leases.lease["spec"]["holderIdentity"] == "one"


async def test_a_silent_leader_stops_before_another_takes_over(
    leases: Leases, clock: Clock
) -> None:
    one, two = (candidate(name, leases, clock) for name in ("one", "two"))
    await one._try_acquire()
    led_together = False
    took_over_s = None
    for _ in range(200):
        await two._try_acquire()
        led_together |= one.is_leading and two.is_leading
        if two.is_leading and took_over_s is None:
            took_over_s = clock.now_s
        clock.now_s += 0.1
    assert not led_together
    assert took_over_s is not None
    assert 15.0 <= took_over_s - 100.0 <= 15.5


async def test_renewals_keep_the_others_waiting(leases: Leases, clock: Clock) -> None:
    one, two = (candidate(name, leases, clock) for name in ("one", "two"))
    for _ in range(30):
        await one._try_acquire()
        await two._try_acquire()
        clock.now_s += 1.0
        assert one.is_leading
        assert not two.is_leading


async def test_who_resigns_is_followed_at_once(leases: Leases, clock: Clock) -> None:
    one, two = (candidate(name, leases, clock) for name in ("one", "two"))
    await one._try_acquire()
    await one.resign()
    await two._try_acquire()
    assert (one.is_leading, two.is_leading) == (False, True)
    assert leases.lease
    assert leases.lease["spec"]["leaseTransitions"] == 2


async def test_no_writes_during_an_api_server_outage_and_the_leader_resumes_after(
    leases: Leases, clock: Clock
) -> None:
    one = candidate("one", leases, clock)
    await one._try_acquire()
    leases.down = True
    clock.now_s += 10.0
    await one._try_acquire()
    assert not one.is_leading
    leases.down = False
    await one._try_acquire()
    assert one.is_leading


async def test_two_that_see_the_same_free_lease_do_not_both_get_it(
    leases: Leases, clock: Clock
) -> None:
    one, two = (candidate(name, leases, clock) for name in ("one", "two"))
    await one._try_acquire()
    await one.resign()
    seen = await leases.get("Lease", "", "")
    await two._replace_lease(two._build_lease(seen))
    with pytest.raises(KubeApiError, match="409"):
        await one._replace_lease(one._build_lease(seen))


async def test_a_slow_renewal_counts_from_before_its_request(leases: Leases, clock: Clock) -> None:
    class Slow(Leases):
        async def request(self, *args: Any, **options: Any) -> Manifest:
            clock.now_s += 9.5
            return await super().request(*args, **options)

    one = candidate("one", Slow(), clock)
    await one._try_acquire()
    assert one.is_leading
    clock.now_s += 0.6
    assert not one.is_leading


async def test_an_api_server_that_is_slow_for_minutes_keeps_its_leader(clock: Clock) -> None:
    class Slow(Leases):
        async def get(self, *args: Any, **options: Any) -> Manifest:
            clock.now_s += 3.0
            return await super().get(*args, **options)

        async def request(self, *args: Any, **options: Any) -> Manifest:
            clock.now_s += 3.0
            return await super().request(*args, **options)

    one = candidate("one", Slow(), clock)
    await one._try_acquire()
    for _ in range(50):
        clock.now_s += 2.0
        assert one.is_leading
        await one._try_acquire()


async def test_a_leader_whose_lease_was_changed_reads_it_again(
    leases: Leases, clock: Clock
) -> None:
    one = candidate("one", leases, clock)
    await one._try_acquire()
    assert leases.lease
    leases.lease["metadata"]["resourceVersion"] = "edited"
    await one._try_acquire()
    await one._try_acquire()
    assert one.remaining_s == 10.0


@pytest.mark.parametrize("times", [(4, 10.0, 2.0), (15, 1.0, 2.0), (15, 10.0, 0.0)])
def test_times_that_contradict_are_refused(times: tuple[int, float, float]) -> None:
    with pytest.raises(ValueError, match="must be below"):
        LeaseConfig(*times)
