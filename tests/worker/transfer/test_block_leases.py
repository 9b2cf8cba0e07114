"""What an owner keeps, and for how long."""

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from cleave_worker.transfer.block_leases import BlockLeases, BlockRequest, FinishedPrefill
from cleave_worker.transfer.handoff import RefusalReason, RefusedError

LONG_S = 60.0
FINISHED = FinishedPrefill(epoch=7, prompt_digest="d", blocks=(4, 5, 6))
WHOLE = BlockRequest("r", 7, "d", first_block=0, num_blocks=3)


def reason_of(holds: BlockLeases, **other: Any) -> RefusalReason:
    with pytest.raises(RefusedError) as caught:
        holds.acquire(replace(WHOLE, **other), wait_s=0.0)
    return caught.value.reason


def test_what_was_read_is_freed_once() -> None:
    holds = BlockLeases(LONG_S, LONG_S)
    holds.grant("r", FINISHED)
    assert holds.acquire(BlockRequest("r", 7, "d", 1, 2), 0.0) == (5, 6)
    assert reason_of(holds) is RefusalReason.BUSY
    assert holds.take_freed() == set()
    assert holds.release("r", 7)
    assert not holds.release("r", 7)
    assert holds.take_freed() == {"r"}
    assert holds.take_freed() == set()
    assert reason_of(holds) is RefusalReason.NOT_HELD


def test_what_does_not_match_is_refused_with_its_reason() -> None:
    holds = BlockLeases(LONG_S, LONG_S)
    holds.grant("r", FINISHED)
    assert reason_of(holds, epoch=6) is RefusalReason.EPOCH
    assert reason_of(holds, prompt_digest="e") is RefusalReason.PROMPT
    assert reason_of(holds, first_block=1) is RefusalReason.MALFORMED
    assert reason_of(holds, first_block=-1) is RefusalReason.MALFORMED
    assert reason_of(holds, request_id="s") is RefusalReason.NOT_HELD
    assert not holds.release("r", 6)
    assert holds.acquire(WHOLE, 0.0) == (4, 5, 6)


def test_a_reader_that_is_early_waits_for_the_engine() -> None:
    holds = BlockLeases(LONG_S, LONG_S)
    leased: list[tuple[int, ...]] = []
    early = threading.Thread(
        target=lambda: leased.append(holds.acquire(BlockRequest("r", 7, "d", 0, 1), LONG_S))
    )
    early.start()
    holds.grant("r", FINISHED)
    early.join(LONG_S)
    assert leased == [(4,)]


def until_freed(holds: BlockLeases) -> set[str]:
    deadline = time.monotonic() + LONG_S
    while not (freed := holds.take_freed()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return freed


def test_unpulled_blocks_are_freed_when_the_lease_ends() -> None:
    holds = BlockLeases(0.02, LONG_S)
    holds.grant("r", FINISHED)
    assert until_freed(holds) == {"r"}
    assert holds.num_expired == 1
    assert reason_of(holds) is RefusalReason.NOT_HELD


def test_a_reader_keeps_the_blocks_beyond_the_lease_but_not_for_ever() -> None:
    holds = BlockLeases(0.02, 0.3)
    holds.grant("r", FINISHED)
    holds.acquire(WHOLE, 0.0)
    assert until_freed(holds) == {"r"}
    assert not holds.release("r", 7), "what was read since is void"
    assert holds.num_leased == 0
