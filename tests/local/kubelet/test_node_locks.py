import fcntl
from pathlib import Path

from cleave.local.kubelet.node import find_locked_cores, parse_locks

LOCKS = """\
1: POSIX  ADVISORY  WRITE 100 00:1a:17 0 EOF
2: FLOCK  ADVISORY  WRITE 200 fe:00:9978536 0 EOF
2: -> FLOCK  ADVISORY  WRITE 201 fe:00:9978537 0 EOF
"""


def test_the_kernels_list_names_files_that_are_held_not_those_waited_for() -> None:
    assert parse_locks(LOCKS) == [(0xFE, 0, 9978536)]


def test_a_core_is_held_while_its_file_is_locked(tmp_path: Path) -> None:
    for core in (0, 3):
        (tmp_path / f"core-{core}.lock").touch()
    assert find_locked_cores(tmp_path) == frozenset()
    with (tmp_path / "core-3.lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert find_locked_cores(tmp_path) == {3}
    assert find_locked_cores(tmp_path) == frozenset()


def test_without_the_folder_or_the_list_no_core_is_held(tmp_path: Path) -> None:
    assert find_locked_cores(tmp_path / "absent") == frozenset()
    assert find_locked_cores(tmp_path, tmp_path / "absent") == frozenset()
