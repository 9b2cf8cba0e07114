"""Notes that the processes of one gateway leave each other."""

from cleave.shm.change_log import LENGTH, make_log


def test_each_reads_what_the_others_noted_since_and_once() -> None:
    log = make_log(3)
    first, second, third = (log.seen_by(process) for process in range(3))
    first.note(1)
    follower, notes = third.follow(), set[int]()
    for which, number in ((first, 7), (second, 8), (third, 9), (first, 7)):
        which.note(number)
    assert follower.take(notes, most=5)
    assert notes == {7, 8}
    notes.clear()
    assert follower.take(notes, most=5)
    assert not notes


def test_too_many_notes_are_not_read_and_those_after_them_are() -> None:
    log = make_log(2)
    first, follower, notes = log.seen_by(0), log.seen_by(1).follow(), set[int]()
    for number in range(4):
        first.note(number)
    assert not follower.take(notes, most=3)
    assert not notes
    first.note(5)
    assert follower.take(notes, most=3)
    assert notes == {5}


def test_notes_are_read_whole_where_the_log_comes_round() -> None:
    log = make_log(2)
    first, second = log.seen_by(0), log.seen_by(1)
    for number in range(LENGTH - 2):
        first.note(number)
    follower, notes = second.follow(), set[int]()
    for number in range(5):
        first.note(100_000 + number)
    assert follower.take(notes, most=5)
    assert notes == {100_000 + number for number in range(5)}


def test_all_may_have_changed_when_a_process_dies_and_its_successor_is_followed() -> None:
    log = make_log(2)
    follower, notes = log.seen_by(1).follow(), set[int]()
    log.seen_by(0).note(3)
    log.forget(0)
    assert not follower.take(notes, most=LENGTH)
    log.seen_by(0).note(4)
    assert follower.take(notes, most=LENGTH)
    assert notes == {4}
