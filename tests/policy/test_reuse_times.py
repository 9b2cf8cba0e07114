"""Last uses of blocks in constant memory, and the counts of tokens by time."""

import mmap

import pytest

from cleave.policy.reuse_times import LAST_USES_BYTES, LastUses, ReuseTimes


def test_memory_is_constant_and_what_was_used_longest_ago_counts_as_new() -> None:
    uses, times = LastUses(mmap.mmap(-1, LAST_USES_BYTES)), ReuseTimes()
    cells = LAST_USES_BYTES // 8
    for number in range(2 * cells):
        uses.record([to_block(number)], 0, 1_025, 400, float(number), times)
    now_s = 2.0 * cells
    counted = ReuseTimes()
    for number in (*range(500), *range(2 * cells - 500, 2 * cells)):
        uses.record([to_block(number)], 1, 1_025, 400, now_s, counted)
    tokens = counted.to_list()
    assert tokens[-1] > 0.9 * 500 * 400, "the first ones"
    assert sum(tokens) == pytest.approx(1_000 * 400)
    assert sum(tokens[:11]) > 0.6 * 500 * 400, "the last ones"


def to_block(number: int) -> int:
    return number * 0x9E3779B1 & 0xFFFFFFFF


def test_counts_of_processes_are_added_where_they_are_counted() -> None:
    one, other = ReuseTimes(), ReuseTimes()
    one.add(3.0, 4)
    other.add(4.0, 5)
    other.add_new(5.0)
    seen = one.to_list()
    one.merge(other.to_list())
    assert (seen[0], seen[1], seen[-1]) == (3.0, 4.0, 5.0)
