"""Whole events, however their bytes come, at a cost in proportion to the bytes."""

import time
from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.gateway.http.buffer_budget import BufferBudget
from cleave.gateway.proxy.event_splitter import (
    MAX_EVENT_BYTES,
    SMALL_EVENT_BYTES,
    EventSplitter,
    EventTooLongError,
)

from tests.support.streams import borders, build_stream, cut, group, sizes, token_lists


@given(token_lists, sizes, borders)
def test_events_come_whole_and_in_order_wherever_they_are_cut(values, parts, places) -> None:
    events = build_stream(group(values, parts), chat=True)
    splitter, seen = EventSplitter(None), b""
    for piece in cut(b"".join(events), places):
        taken = splitter.take(piece)
        assert not taken or taken.endswith(b"\n\n")
        seen += taken
    assert seen == b"".join(events)
    assert not splitter.partial


def spend(size: int) -> float:
    """CPU seconds for an event of so many KiB in pieces of 256 bytes; the least of five runs."""
    piece, runs = b"x" * 256, []
    for _ in range(5):
        splitter, begun = EventSplitter(None), time.process_time()
        for _ in range(4 * size):
            splitter.take(piece)
        splitter.take(b"\n\n")
        runs.append(time.process_time() - begun)
    return min(runs)


def test_a_long_event_costs_as_much_for_each_of_its_bytes_as_a_short_one() -> None:
    assert spend(1_024) < 4 * 16 * spend(64)


def test_an_incomplete_event_is_reserved_and_has_a_limit() -> None:
    budget = BufferBudget(1 << 20)
    splitter = EventSplitter(budget)
    splitter.take(b"x" * SMALL_EVENT_BYTES)
    assert budget.used == 0
    splitter.take(b"x")
    assert budget.used > SMALL_EVENT_BYTES
    with pytest.raises(EventTooLongError):
        splitter.take(b"x" * (1 << 20))
    assert budget.used == 0
    splitter = EventSplitter(None)
    with pytest.raises(EventTooLongError):
        splitter.take(b"x" * (MAX_EVENT_BYTES + 1))


@pytest.mark.parametrize("end", [b"x", b"\n\n"])
@given(excess=st.integers(-4, 4), piece=st.sampled_from([64 << 10, 100_001, 1 << 20]))
@settings(max_examples=20)
def test_the_limit_holds_wherever_the_event_is_cut(end: bytes, excess: int, piece: int) -> None:
    splitter, data = EventSplitter(None), b"x" * (MAX_EVENT_BYTES + excess - len(end)) + end
    with pytest.raises(EventTooLongError) if excess > 0 else nullcontext():
        for at in range(0, len(data), piece):
            splitter.take(data[at : at + piece])


def test_a_complete_event_gives_its_room_back() -> None:
    budget = BufferBudget(1 << 20)
    splitter = EventSplitter(budget)
    splitter.take(b"x" * (64 << 10))
    assert splitter.take(b"\n\nrest") == b"x" * (64 << 10) + b"\n\n"
    assert (budget.used, bytes(splitter.partial)) == (0, b"rest")
