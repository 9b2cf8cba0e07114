"""Rows of cells in one memory, as several processes see them."""

import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from cleave.shm.table import SharedTable


@pytest.fixture
def table() -> Iterator[SharedTable]:
    new_table = SharedTable(4, 3, own=2, common=2)
    yield new_table
    new_table.close()


def test_a_key_has_the_same_row_in_all_processes(table) -> None:
    rows = [table.for_process(process).claim(b"one") for process in range(3)]
    assert rows == [rows[0]] * 3
    assert table.for_process(1).claim(b"two") != rows[0]


def test_a_released_row_is_reused_empty_by_another_key(table) -> None:
    first, second = table.for_process(0), table.for_process(1)
    row = first.claim(b"old")
    assert second.claim(b"old") == row
    first.cells[first.locate_own(row, 1)] = 5.0
    first.cells[first.locate_common(row, 0)] = 7.0
    first.release(row)
    others = {first.claim(b"%d" % number) for number in range(3)}
    assert row not in others
    assert first.claim(b"too many") is None
    second.release(row)
    assert first.claim(b"too many") == row
    assert first.cells[first.locate_common(row, 0)] == 0.0
    assert first.read(row, 1) == (0.0, 0.0, 0.0)


def test_what_the_maker_claims_stays_when_all_processes_have_died(table) -> None:
    row = table.claim(b"for ever")
    for process in range(3):
        table.for_process(process).claim(b"for ever")
        table.clear_process(process)
    assert all(table.for_process(0).claim(b"%d" % number) not in (row, None) for number in range(3))


def test_cells_of_one_process_are_beside_those_of_the_others(table) -> None:
    row = table.claim(b"a")
    for process in range(3):
        one = table.for_process(process)
        one.cells[one.locate_own(row, 0)] += process + 1
    assert table.read(row, 0) == (1.0, 2.0, 3.0)
    table.clear_process(1)
    assert table.read(row, 0) == (1.0, 0.0, 3.0)


def test_another_process_sees_what_is_written_at_once() -> None:
    run_forking(
        """
        row = table.claim(b"a")
        child = os.fork()
        if not child:
            one = table.for_process(2)
            one.cells[one.locate_own(one.claim(b"a"), 0)] = 42.0
            os.write(writing, b"x")
            os._exit(0)
        assert os.read(reading, 1) == b"x"
        assert table.read(row, 0) == (0.0, 0.0, 42.0)
        os.waitpid(child, 0)
        """
    )


def test_another_process_reads_which_rows_have_changed() -> None:
    run_forking(
        """
        reader, changed = table.for_process(0).change_log.open_reader(), set()
        child = os.fork()
        if not child:
            table.for_process(2).change_log.record(3)
            os._exit(0)
        os.waitpid(child, 0)
        assert reader.drain(changed, 1) and changed == {3}
        table.clear_process(2)
        assert not reader.drain(changed, 1)
        """
    )


def test_a_lock_that_is_not_given_back_is_not_waited_for_long() -> None:
    run_forking(
        """
        child = os.fork()
        if not child:
            with table._lock():
                os.write(writing, b"x")
                signal.alarm(30)
                signal.pause()
        assert os.read(reading, 1) == b"x"
        assert table.for_process(0).claim(b"a") is None
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert table.for_process(0).claim(b"a") is not None
        """
    )


def run_forking(script: str) -> None:
    """In a process of one thread, as gateways fork: others' threads may hold locks for ever."""
    subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(script)], check=True, timeout=60
    )


PRELUDE = """
import os
import signal

from cleave.shm.table import SharedTable

table = SharedTable(4, 3, own=2, common=2)
reading, writing = os.pipe()
"""
