"""Bounds without a simulation: never below what simulations find."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.planner.problem import Policies
from cleave.planner.search import capacity_bound
from cleave.planner.search.candidate_placement import build_cell
from cleave.planner.search.capacity_bound import LengthStatistics
from cleave.planner.search.trials import CONFIRMATION_PRECISION, Targets, Trials
from cleave.simulator.run import simulate
from cleave.simulator.trace import PromptBlocks, Trace
from cleave.traffic.conversations import Conversations
from cleave.traffic.workload import Demand

from tests.support import known_problems


def trace(prompts: list[int], outputs: list[int]) -> Trace:
    return Trace(np.arange(len(prompts), dtype=float), np.array(prompts), np.array(outputs))


def test_the_mean_context_counts_every_pass_once() -> None:
    lengths = LengthStatistics.from_trace(trace([10, 100], [3, 1]))
    # The first request decodes twice, on 11 and 12 tokens; the second never.
    assert lengths.decode_context == pytest.approx(11.5)
    assert lengths.decode_steps == 1
    assert lengths.computed_squares == pytest.approx((100 + 10_000) / 2)


def test_what_an_earlier_prompt_has_is_not_computed_and_its_memory_is_shared() -> None:
    blocks = PromptBlocks(16, np.array([0, 2, 4]), np.array([0, 1, 0, 2]), 3)
    repeating = replace(trace([32, 32], [3, 3]), blocks=blocks)
    lengths = LengthStatistics.from_trace(repeating)
    assert lengths.prompt_tokens == 32
    assert lengths.computed_tokens == 24
    assert lengths.computed_squares == 32**2 - 16**2 / 2
    assert lengths.decode_context - lengths.own_context == 8
    # Those that fill caches are not counted.
    assert LengthStatistics.from_trace(repeating, 1).computed_tokens == 16


def test_requests_of_one_token_bound_no_decoding() -> None:
    problem = known_problems.problem()
    engine = (
        known_problems.whole(problem, known_problems.of_size(problem)).groups[0].instance.engine
    )
    assert capacity_bound.compute_decode_rate(
        engine, LengthStatistics.from_trace(trace([10], [1]))
    ) == float("inf")


@pytest.mark.parametrize("size", [(1, 1), (2, 1), (1, 4), (4, 2)])
def test_an_overloaded_fleet_never_serves_more_than_its_bound(size: tuple[int, int]) -> None:
    problem = known_problems.problem()
    candidate = known_problems.of_size(problem, *size)
    trials = Trials(problem.demand, precision=CONFIRMATION_PRECISION)
    for draft in (
        known_problems.whole(problem, candidate),
        known_problems.split(problem, candidate, 1, candidate, 1),
        known_problems.split(problem, candidate, 2, candidate, 1),
    ):
        fleet = build_cell(problem, draft)
        bound = capacity_bound.compute_fleet_rate(fleet, trials.get_lengths(4000))
        outcome = simulate(fleet, trials.build_trace(4000, 4 * bound))
        served = len(outcome.end_ms) / float(np.nanmax(outcome.end_ms)) * 1000
        assert served <= bound * 1.001


def test_nor_does_one_whose_prompts_repeat() -> None:
    chat = known_problems.chat(prompt=900, output=60)
    chats = replace(chat.source, conversations=Conversations(8, 40, 64))
    problem = known_problems.problem(Demand(10.0, chats, 2048), policies=Policies())
    candidate = known_problems.of_size(problem)
    trials = Trials(problem.demand, precision=CONFIRMATION_PRECISION)
    blind = Trials(problem.demand.without_reuse(), precision=CONFIRMATION_PRECISION)
    for draft in (
        known_problems.whole(problem, candidate),
        known_problems.split(problem, candidate, 1, candidate, 2),
    ):
        fleet = build_cell(problem, draft)
        bound = capacity_bound.compute_fleet_rate(fleet, trials.get_lengths(4000))
        assert bound > 1.5 * capacity_bound.compute_fleet_rate(fleet, blind.get_lengths(4000))
        outcome = simulate(fleet, trials.build_trace(4000, 4 * bound))
        served = len(outcome.end_ms) / float(np.nanmax(outcome.end_ms)) * 1000
        assert served <= bound * 1.001


@given(
    rate=st.floats(0.1, 12),
    ttft_ms=st.floats(20, 2000),
    tpot_ms=st.floats(15, 200),
    size=st.sampled_from([(1, 1), (2, 1), (2, 4)]),
)
def test_no_request_is_faster_in_company_than_alone(
    rate: float, ttft_ms: float, tpot_ms: float, size: tuple[int, int]
) -> None:
    problem = known_problems.problem()
    draft = known_problems.whole(problem, known_problems.of_size(problem, *size))
    sample = Trials(problem.demand).build_trace(300, rate)
    outcome = simulate(build_cell(problem, draft), sample)
    alone = capacity_bound.compute_unloaded_attainment(
        draft.groups[0].instance.engine, sample, ttft_ms, tpot_ms
    )
    assert outcome.compute_attainment(ttft_ms, tpot_ms) <= alone


def test_where_a_search_begins_is_near_where_it_ends() -> None:
    problem = known_problems.blog()
    trials = Trials(problem.demand)
    candidate = known_problems.of_size(problem)
    for draft, goodput in (
        (known_problems.split(problem, candidate, 1, candidate, 1), 10.9),
        (known_problems.whole(problem, candidate), 3.7),
    ):
        likely = capacity_bound.estimate_rate(
            build_cell(problem, draft), trials.get_lengths(), 40.0
        )
        assert goodput / 2.5 < likely < goodput * 2.5


def test_a_tpot_target_that_no_pass_meets_leaves_nothing() -> None:
    problem = known_problems.problem()
    engine = known_problems.split(
        problem, known_problems.of_size(problem), 1, known_problems.of_size(problem), 1
    )
    lengths = Trials(problem.demand).get_lengths()
    assert (
        capacity_bound.compute_decode_rate(engine.groups[1].instance.engine, lengths, tpot_ms=5.0)
        == 0
    )
    assert Targets(400, 40, 0.9).scale(2) == Targets(800, 80, 0.9)
