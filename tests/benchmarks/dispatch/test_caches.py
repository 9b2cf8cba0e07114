"""The policies of others that Cleave's dispatch is compared with."""

from dataclasses import replace

import caches
import numpy as np
import pytest

from cleave.simulator.fleet import SimulatedFleet, SimulatedPool
from cleave.simulator.trace import Trace

from tests.simulator.test_prefix_caches import build_engine, build_trace


def choose(name: str, trace: Trace, is_split: bool = False) -> list[int]:
    """The instances of three at which a policy has the prompts computed."""
    (policy,) = (each for each in caches.COMPARED if each.name == name)
    pool = (SimulatedPool(build_engine(4_000), 3),)
    fleet = SimulatedFleet(prefill=pool, decode=pool) if is_split else SimulatedFleet(mixed=pool)
    chosen = caches.build_server(policy, fleet, lambda _: trace)(trace.rate).prefill_instance
    return [int(each) for each in chosen]


@pytest.mark.parametrize("is_split", [False, True])
def test_a_pinned_session_stays_where_it_is(is_split) -> None:
    prompts = [(40, "abcdefghij"), (40, "aBCDEFGHIJ"), (44, "abcdefghijk"), (20, "aBCDE")]
    first, second, third, fourth = choose("session pinned", build_trace(prompts), is_split)
    assert (first, second) == (third, fourth)


@pytest.mark.parametrize("is_split", [False, True])
def test_a_radix_tree_prefers_the_longest_match_above_its_threshold(is_split) -> None:
    # A fifth of the third prompt matches, so it goes to the instance that got the fewest blocks.
    prompts = [(40, "abcdefghij"), (40, "klmnopqrst"), (40, "abXXXXXXXX"), (40, "abcdYYYYYY")]
    first, second, third, fourth = choose("radix tree (sglang)", build_trace(prompts), is_split)
    assert len({first, second, third}) == 3
    assert fourth == first


def test_a_radix_tree_ignores_matches_while_requests_are_out_of_balance() -> None:
    together = build_trace([(40, "abcdefghij")] * 70)
    together = replace(together, arrival_ms=np.linspace(0.0, 0.001, 70))
    chosen = choose("radix tree (sglang)", together)
    assert set(chosen[:65]) == {chosen[0]}
    assert chosen[65] != chosen[0]


def test_one_cache_without_limit_computes_each_block_once() -> None:
    trace = build_trace([(40, "abcdefghij"), (40, "abcdeXXXXX")])
    assert caches.compute_least_share(trace) == pytest.approx(60 / 80)


def test_arrivals_of_one_moment_are_spread_until_the_next() -> None:
    spread = caches.spread_arrivals(np.array([0.0, 0.0, 0.0, 3_000.0, 6_000.0, 6_000.0]))
    assert spread.tolist() == [0.0, 1_000.0, 2_000.0, 3_000.0, 6_000.0, 6_000.0]
