"""Conversations that repeat as observed traffic does."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cleave.simulator.trace import Trace
from cleave.traffic.conversations import Conversations
from cleave.traffic.counters import Buckets
from cleave.traffic.refit import refit
from cleave.traffic.reuse_curve import build_curve, measure_reuse
from cleave.traffic.reuse_fit import LEAST_SHARE, get_repeated_share
from cleave.traffic.window import TrafficWindow
from cleave.traffic.workload import (
    Demand,
    GeneratedRequests,
    IndependentLengths,
    LogNormal,
    build_from_spec,
)

from tests.support.traffic_windows import draw

LENGTHS = IndependentLengths(
    LogNormal.from_mean_and_p90(2000, 4000), LogNormal.from_mean_and_p90(200, 400)
)
NUM = 60
ANSWERED = Buckets((2.0, math.inf), (1.0, 1.0), 1.0)


def demand(**conversations: float) -> Demand:
    return Demand(10.0, GeneratedRequests(LENGTHS, conversations=Conversations(**conversations)))


def observe(source: Demand) -> list[TrafficWindow]:
    """Windows with what repeats, in the last of them, and answers that take a second."""
    windows = list(draw(source, NUM))
    reuse = measure_reuse(source.draw(30_000))
    return [*windows[:-1], replace(windows[-1], reuse=reuse, ttft=ANSWERED)]


def curve(trace: Trace):
    return build_curve(measure_reuse(trace), trace.prompt_tokens.sum() / trace.arrival_ms[-1] * 1e3)


@pytest.mark.parametrize(
    "conversations",
    [
        {"turns": 5, "interval_requests": 600, "new_tokens": 256, "shared_tokens": 640},
        {"turns": 2, "interval_requests": 3_000, "new_tokens": 100},
        {"turns": 12, "interval_requests": 300, "new_tokens": 64},
    ],
)
def test_fitted_conversations_have_the_same_hits(conversations: dict[str, float]) -> None:
    source = demand(**conversations)
    workload = refit(observe(source))
    assert workload.reuse is not None
    fitted = build_from_spec(workload, Path())
    expected, found = curve(source.draw(30_000)), curve(fitted.draw(30_000))
    for kv_tokens in (100_000, 500_000, 2_000_000, 10_000_000):
        share = expected.find_share(kv_tokens)
        assert found.find_share(kv_tokens) == pytest.approx(share, abs=0.06), kv_tokens


def test_intervals_are_distinguished_from_what_all_share() -> None:
    source = demand(turns=4, interval_requests=1_000, new_tokens=200, shared_tokens=800)
    blocks = source.draw(30_000).blocks
    # The first prompts of many conversations are shorter than what all share.
    shared = np.count_nonzero(blocks.numbers < 800 // blocks.block_tokens) * blocks.block_tokens
    reuse = refit(observe(source)).reuse
    assert reuse is not None
    assert reuse.turn_interval_s == pytest.approx(100, rel=0.1)
    assert reuse.shared_tokens == pytest.approx(shared / 30_000, rel=0.1)
    alone = refit(observe(demand(turns=4, interval_requests=1_000, new_tokens=200))).reuse
    assert alone is not None
    assert alone.shared_tokens < 50


def test_little_that_repeats_is_nothing() -> None:
    windows = list(draw(demand(turns=1, interval_requests=0, new_tokens=1), NUM))
    assert refit(windows).reuse is None, "gateways that do not look at prompts"
    few = Buckets((60.0, math.inf), (LEAST_SHARE - 0.01, 1.0))
    assert refit([*windows, replace(windows[-1], reuse=few)]).reuse is None


def test_the_share_is_that_of_all_known_tokens() -> None:
    assert get_repeated_share(Buckets()) is None
    assert get_repeated_share(Buckets((1.0, 2.0, math.inf), (1.0, 3.0, 4.0))) == 0.75
    assert get_repeated_share(Buckets((math.inf,), (4.0,))) == 0.0
