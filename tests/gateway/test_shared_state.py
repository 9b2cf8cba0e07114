"""What processes of one gateway leave word of."""

from pathlib import Path

import pytest

from cleave.gateway.shared_state import MISSING_S, Siblings


@pytest.fixture
def four(tmp_path: Path):
    siblings = Siblings(4, tmp_path)
    yield [siblings.seen_by(process) for process in range(4)]
    siblings.close()


def test_a_process_that_is_not_heard_for_long_is_missing(four) -> None:
    for one in four:
        one.beat(1000.0, 0, 0)
    four[0].beat(1000.0 + MISSING_S + 1, 0, 0)
    assert four[3].find_missing(1000.0 + MISSING_S) == []
    assert four[3].find_missing(1000.5 + MISSING_S) == [
        (process, MISSING_S + 0.5) for process in (1, 2, 3)
    ]


def test_what_is_left_of_the_queue_is_shared_out_by_need(four) -> None:
    assert [one.find_room(0, 100) for one in four] == [25] * 4
    four[0].beat(0.0, 60, 60)
    assert four[0].find_room(60, 100) == 70
    assert four[1].find_room(0, 100) == 10
    four[1].beat(0.0, 40, 40)
    assert [one.find_room(n, 100) for one, n in zip(four, (60, 40, 0, 0), strict=True)] == [
        60,
        40,
        1,
        1,
    ]


def test_a_dead_process_serves_nothing_and_waits_for_nothing(four) -> None:
    for number, one in enumerate(four):
        one.begin(100 + number)
        one.beat(5.0, 10, 20)
    four[0].forget(2)
    assert four[1].count_in_flight() == 60
    assert four[1].list_pids() == [100, 101, 103]
    assert four[1].find_room(10, 34) == 11


def test_counts_are_read_as_they_were_left_last(four) -> None:
    assert four[0].read_counts(3) == b""
    four[3].write_counts(b"one")
    four[3].write_counts(b"two")
    assert four[0].read_counts(3) == b"two"


def test_a_process_that_cannot_write_serves_on(four, tmp_path: Path, caplog) -> None:
    four[0].clear_up()
    for _ in range(3):
        four[0].write_counts(b"one")
    assert four[1].read_counts(0) == b""
    assert [record.levelname for record in caplog.records] == ["WARNING"]
