"""Notes that the processes of one gateway leave each other."""

from cleave.shm.change_log import CAPACITY, build_change_log


def test_each_reads_what_the_others_noted_since_and_once() -> None:
    log = build_change_log(3)
    first, second, third = (log.for_process(process) for process in range(3))
    first.record(1)
    reader, changed = third.open_reader(), set[int]()
    for which, number in ((first, 7), (second, 8), (third, 9), (first, 7)):
        which.record(number)
    assert reader.drain(changed, limit=5)
    assert changed == {7, 8}
    changed.clear()
    assert reader.drain(changed, limit=5)
    assert not changed


def test_too_many_notes_are_not_read_and_those_after_them_are() -> None:
    log = build_change_log(2)
    first, reader, changed = log.for_process(0), log.for_process(1).open_reader(), set[int]()
    for number in range(4):
        first.record(number)
    assert not reader.drain(changed, limit=3)
    assert not changed
    first.record(5)
    assert reader.drain(changed, limit=3)
    assert changed == {5}


def test_notes_are_read_whole_where_the_log_comes_round() -> None:
    log = build_change_log(2)
    first, second = log.for_process(0), log.for_process(1)
    for number in range(CAPACITY - 2):
        first.record(number)
    reader, changed = second.open_reader(), set[int]()
    for number in range(5):
        first.record(100_000 + number)
    assert reader.drain(changed, limit=5)
    assert changed == {100_000 + number for number in range(5)}


def test_all_may_have_changed_when_a_process_dies_and_its_successor_is_followed() -> None:
    log = build_change_log(2)
    reader, changed = log.for_process(1).open_reader(), set[int]()
    log.for_process(0).record(3)
    log.invalidate_process(0)
    assert not reader.drain(changed, limit=CAPACITY)
    log.for_process(0).record(4)
    assert reader.drain(changed, limit=CAPACITY)
    assert changed == {4}
