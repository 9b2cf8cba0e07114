"""Clients that send a request when they have the answer to the one before."""

from collections.abc import Callable
from itertools import accumulate
from types import ModuleType

import pytest

from cleave.perf.timing import EngineTiming

Import = Callable[[str], ModuleType]

TIMING = EngineTiming(1000.0, (0.0, 10.0), 0.0, (5.0, 5.0), (0.0,))
"""5 ms an iteration, and 10 ms more for a prompt of 1,000 tokens."""


def run(module: Import, clients: int, kv_tokens: int, output_tokens: int = 100) -> list[float]:
    loop = module("closed_loop")
    load = loop.Load(clients, 1000, output_tokens, 1.0, 8192, kv_tokens)
    return list(loop.ClosedLoop(TIMING, load, 0.0).run())


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("until_ms", [0.0, 4.9, 10.0, 10.1, 57.0, 1e9])
def test_a_leap_over_decode_iterations_ends_where_single_steps_end(
    module: Import, until_ms: float, ahead: int
) -> None:
    timing = EngineTiming(1024.0, (0.0, 0.0), 0.0, (5.0, 5.0, 6.0), (0.01, 0.01, 0.02))
    ends = list(accumulate(timing.predict_decode_ms(2, 100 + 2 * each) for each in range(20)))
    running = sum(begin < until_ms for begin in [0.0, *ends[:-1]])
    count = min(max(running + ahead, 1), 20)
    leap = module("closed_loop").sum_decode_ms(timing, 2, 100, 20, until_ms, ahead)
    last_ms = timing.predict_decode_ms(2, 100 + 2 * (count - 1))
    assert leap == (count, pytest.approx(ends[count - 1]), pytest.approx(last_ms))


def test_requests_wait_while_kv_has_no_room_for_their_prompts(module: Import) -> None:
    alone, waiting, together = (
        run(module, clients, kv) for clients, kv in ((1, 10000), (2, 1900), (2, 10000))
    )
    # With room for one of two, tokens come as to a single client, and half of the time is waiting.
    assert waiting[1] == pytest.approx(alone[1])
    assert waiting[0] > alone[0] + 0.9 * 100 * alone[1]
    assert together[0] < 2.1 * alone[0]


def test_a_request_that_lost_its_kv_is_computed_again(module: Import) -> None:
    room, full = (run(module, 4, kv, output_tokens=1000) for kv in (100_000, 6000))
    # 4 prompts fit and 4 whole requests do not: tokens take longer, and later prompts wait.
    assert full[1] > 1.02 * room[1]
    assert full[0] > 2 * room[0]
