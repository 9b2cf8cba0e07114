"""What processes of one gateway leave word of."""

from pathlib import Path

import pytest

from cleave.gateway.shared_state import HEARTBEAT_TIMEOUT_S, SharedGatewayState
from cleave.time_slices import run_at_once


@pytest.fixture
def four(tmp_path: Path):
    shared_state = SharedGatewayState(4, tmp_path)
    yield [shared_state.for_process(process) for process in range(4)]
    shared_state.close()


def test_a_process_that_is_not_heard_for_long_is_missing(four) -> None:
    for one in four:
        one.publish_heartbeat(1000.0, 0, 0)
    four[0].publish_heartbeat(1000.0 + HEARTBEAT_TIMEOUT_S + 1, 0, 0)
    assert four[3].list_hung(1000.0 + HEARTBEAT_TIMEOUT_S) == []
    assert four[3].list_hung(1000.5 + HEARTBEAT_TIMEOUT_S) == [
        (process, HEARTBEAT_TIMEOUT_S + 0.5) for process in (1, 2, 3)
    ]


def test_what_is_left_of_the_queue_is_shared_out_by_need(four) -> None:
    assert [one.compute_queue_limit(0, 100) for one in four] == [25] * 4
    four[0].publish_heartbeat(0.0, 60, 60)
    assert four[0].compute_queue_limit(60, 100) == 70
    assert four[1].compute_queue_limit(0, 100) == 10
    four[1].publish_heartbeat(0.0, 40, 40)
    assert [
        one.compute_queue_limit(n, 100) for one, n in zip(four, (60, 40, 0, 0), strict=True)
    ] == [
        60,
        40,
        1,
        1,
    ]


def test_a_dead_process_serves_nothing_and_waits_for_nothing(four) -> None:
    for number, one in enumerate(four):
        one.register_process(100 + number)
        one.publish_heartbeat(5.0, 10, 20)
    four[0].clear_process(2)
    assert four[1].count_in_flight() == 60
    assert four[1].list_pids() == [100, 101, 103]
    assert four[1].compute_queue_limit(10, 34) == 11


def test_counts_are_read_as_they_were_left_last(four) -> None:
    assert list(four[0].read_counters(3)) == []
    run_at_once(four[3].write_counters([b"one"]))
    run_at_once(four[3].write_counters([b"two", b"", b"three" * 1_000]))
    unfinished = four[3].write_counters([b"four"])
    next(unfinished)
    assert list(four[0].read_counters(3)) == [b"two", b"", b"three" * 1_000]


def test_a_process_that_cannot_write_serves_on(four, tmp_path: Path, caplog) -> None:
    four[0].remove_files()
    for _ in range(3):
        run_at_once(four[0].write_counters([b"one"]))
    assert list(four[1].read_counters(0)) == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]
