"""Leases of held blocks."""

import pytest

from cleave_worker.transfer.leases import LeaseTable


def test_a_lease_ends_when_its_time_is_over() -> None:
    leases = LeaseTable(30)
    leases.grant("a", now=0)
    leases.grant("b", now=5)
    assert leases.next_expiry == 30
    assert leases.expire(now=29.9) == []
    assert leases.expire(now=30) == ["a"]
    assert leases.next_expiry == 35


def test_a_heartbeat_extends_by_two_thirds_and_never_shortens() -> None:
    leases = LeaseTable(30)
    leases.grant("a", now=0)
    leases.extend("a", now=5)
    assert leases.next_expiry == 30
    leases.extend("a", now=25)
    assert leases.next_expiry == 45


def test_an_ended_lease_ends_once_and_cannot_be_extended() -> None:
    leases = LeaseTable(30)
    leases.grant("a", now=0)
    assert leases.end("a")
    assert not leases.end("a")
    leases.extend("a", now=1)
    assert leases.next_expiry is None


def test_heartbeats_extend_a_lease_to_ten_times_its_duration_at_most() -> None:
    table = LeaseTable(10.0)
    table.grant("a", 0.0)
    ended = None
    for second in range(200):
        table.extend("a", float(second))
        if table.expire(float(second)):
            ended = second
            break
    assert ended == 100
    table.grant("a", 200.0)
    table.extend("a", 205.0)
    assert table.next_expiry == pytest.approx(211.67, abs=0.01)
