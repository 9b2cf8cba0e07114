"""The reuse curve against caches that are simulated block by block."""

import math
from collections import OrderedDict

import numpy as np
import pytest

from cleave.simulator.trace import Trace
from cleave.traffic.conversations import Conversations
from cleave.traffic.counters import Buckets
from cleave.traffic.reuse_curve import build_curve, measure_reuse
from cleave.traffic.workload import Demand, GeneratedRequests, IndependentLengths, LogNormal

LENGTHS = IndependentLengths(
    LogNormal.from_mean_and_p90(2000, 4000), LogNormal.from_mean_and_p90(200, 400)
)
CHATS = Conversations(turns=5, interval_requests=600, new_tokens=256, shared_tokens=640)


def count_hits(trace: Trace, kv_tokens: float, skipped: int) -> float:
    """The hit share of one cache that evicts what was used longest ago, a prompt's end first."""
    blocks, held, used, hits, total = trace.blocks, OrderedDict(), 0, 0, 0
    for at, tokens in enumerate(trace.prompt_tokens.tolist()):
        numbers = blocks.numbers[blocks.starts[at] : blocks.starts[at + 1]].tolist()
        sizes = [
            min(blocks.block_tokens, tokens - place * blocks.block_tokens)
            for place in range(len(numbers))
        ]
        found = 0
        for number, size in zip(numbers, sizes, strict=True):
            if number not in held:
                break
            found += size
        if at >= skipped:
            hits, total = hits + found, total + tokens
        for number, size in zip(numbers[::-1], sizes[::-1], strict=True):
            used += size if number not in held else 0
            held[number] = size
            held.move_to_end(number)
        while used > kv_tokens:
            used -= held.popitem(last=False)[1]
    return hits / total


@pytest.mark.parametrize("kv_tokens", [50_000, 200_000, 500_000, 1_000_000, 4_000_000])
def test_it_is_that_of_a_cache_that_evicts_what_was_used_longest_ago(kv_tokens: float) -> None:
    trace = Demand(10.0, GeneratedRequests(LENGTHS, conversations=CHATS)).draw(12_000)
    rate = trace.prompt_tokens.sum() / trace.arrival_ms[-1] * 1000
    second = slice(6_000, 12_000)
    # As measured in running traffic: uses before the window are known.
    whole, half = measure_reuse(trace), measure_reuse(trace.take_first(6_000))
    counted = Buckets(whole.bounds, tuple(np.subtract(whole.counts, half.counts).tolist()))
    assert counted.num == trace.prompt_tokens[second].sum()
    found = build_curve(counted, rate).find_share(kv_tokens)
    assert found == pytest.approx(count_hits(trace, kv_tokens, 6_000), abs=0.02)


def test_answers_in_the_cache_leave_less_room() -> None:
    reuse = Buckets((10.0, 100.0, math.inf), (400.0, 800.0, 1_000.0))
    alone, with_answers = build_curve(reuse, 100.0), build_curve(reuse, 100.0, 20.0)
    assert alone.find_share(1_000) > with_answers.find_share(1_000)
    assert alone.find_share(1e9) == with_answers.find_share(1e9) == 0.8
    assert alone.find_share(0) == 0


def test_without_tokens_there_is_no_curve() -> None:
    with pytest.raises(ValueError, match="read the counters of a gateway twice"):
        build_curve(Buckets(), 10.0)


def test_without_blocks_all_tokens_are_new() -> None:
    trace = Demand(10.0, GeneratedRequests(LENGTHS)).draw(100)
    assert measure_reuse(trace).counts == (trace.prompt_tokens.sum(),)
