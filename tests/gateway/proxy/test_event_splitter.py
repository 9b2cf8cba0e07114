"""Whole events, however their bytes come, at a cost in proportion to the bytes."""

import time
from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.gateway.http.buffer_budget import BufferBudget
from cleave.gateway.proxy.event_splitter import (
    MAX_EVENT_BYTES,
    MAX_PROMPT_IDS_BYTES,
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
        ids = splitter.prompt_ids
        seen += taken.replace(b'_ids":[]', b'_ids":[%b]' % ids, 1) if ids else taken
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
    assert spend(512 - 1) < 4 * 16 * spend(32)


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
@given(excess=st.integers(-4, 4), piece=st.sampled_from([64 << 10, 100_001, 400_000]))
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


def build_first_event(ids: bytes, rest: bytes = b"") -> bytes:
    return b'data: {"choices":[{"index":0,"text":"a","prompt_token_ids":[%b]%b}]}\n\n' % (ids, rest)


def take_all(event: bytes, step: int) -> tuple[bytes, bytes]:
    splitter, seen = EventSplitter(BufferBudget(1 << 26)), b""
    for at in range(0, len(event), step):
        seen += splitter.take(event[at : at + step])
    return seen, splitter.prompt_ids


@pytest.mark.parametrize("step", [1, 7, 50, 4_096])
def test_the_ids_of_a_prompt_are_taken_out_wherever_they_are_cut(step: int) -> None:
    ids = b",".join(b"%d" % each for each in range(0, 128_000, 97))
    assert take_all(build_first_event(ids), step) == (build_first_event(b""), ids)


def test_ids_may_be_longer_than_an_event_but_have_a_limit() -> None:
    ids = b"123456," * (MAX_PROMPT_IDS_BYTES // 7)
    assert take_all(build_first_event(ids), 4_096) == (build_first_event(b""), ids)
    with pytest.raises(EventTooLongError):
        take_all(build_first_event(ids + b"1" * 7), 4_096)
    with pytest.raises(EventTooLongError):
        take_all(build_first_event(ids, b"x" * MAX_EVENT_BYTES), 4_096)


@pytest.mark.parametrize("ids", [b"1, 2, 3", b'"a"', b"[1]", b"1,2" * 2_000 + b" ,3", b"null"])
@pytest.mark.parametrize("step", [1, 50, 4_096])
def test_what_is_no_list_of_ids_stays_in_the_event(ids: bytes, step: int) -> None:
    event = build_first_event(ids)
    seen, taken = take_all(event, step)
    # Of a list that an engine begins as one, the beginning may have been taken out and put back.
    assert (seen, taken) == (event, b"") or seen.replace(b"[]", b"[%b]" % taken, 1) == event


def test_long_lists_that_are_no_ids_have_the_limit_of_events() -> None:
    with pytest.raises(EventTooLongError):
        take_all(build_first_event(b"1, " * MAX_EVENT_BYTES), 4_096)


def test_room_for_ids_is_reserved_and_given_back() -> None:
    budget = BufferBudget(1 << 20)
    splitter = EventSplitter(budget)
    splitter.take(build_first_event(b"1," * 100_000)[:200_000])
    assert budget.used > 200_000 - SMALL_EVENT_BYTES
    splitter.clear()
    assert budget.used == 0
    with pytest.raises(EventTooLongError):
        splitter.take(build_first_event(b"1," * 400_000)[:700_000])
    assert budget.used == 0
