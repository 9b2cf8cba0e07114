"""Copies of KV outside the emulated engine's block pool."""

from cleave_worker.emulator.host_memory import HostMemory

A, B, C, D = (bytes([each]) for each in range(4))


def test_the_longest_run_of_blocks_is_found() -> None:
    host = HostMemory(4)
    host.keep([A, B, C], [1, 2, 3])
    assert host.find([A, B, D]) == [1, 2]
    assert host.find([D, A]) == []


def test_the_blocks_used_longest_ago_go_first_and_of_a_prompt_its_end() -> None:
    host = HostMemory(3)
    host.keep([A, B], [1, 2])
    host.keep([C, D], [3, 4])
    assert host.find([A, B]) == [1]
    host.keep([A], [1])
    host.keep([B], [2])
    assert host.find([C, D]) == [3]
    assert host.find([A, B]) == [1, 2]


def test_a_block_that_is_there_is_not_copied_again() -> None:
    host = HostMemory(2)
    host.keep([A], [1])
    host.keep([A], [5])
    assert host.find([A]) == [1]
