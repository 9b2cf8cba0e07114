"""Predictions of what is deployed, and which prompts a plan lets decode instances compute."""

from dataclasses import replace

import pytest

from cleave.api.deployment import Slo
from cleave.perf.timing import PromptChunk
from cleave.planner.problem import Problem
from cleave.planner.result import prediction
from cleave.planner.result.text import format_attainment
from cleave.planner.search import capacity_bound
from cleave.planner.search.candidate_placement import (
    CandidatePlacement,
    build_cell,
    build_deployed_cell,
)
from cleave.planner.search.context import SearchContext
from cleave.planner.search.long_trials import sample_service
from cleave.planner.search.trials import Trials
from cleave.simulator.run import simulate

from tests.support.known_problems import blog, chat, of_size, split, whole
from tests.support.known_problems import problem as known_problem


def find(problem: Problem, draft: CandidatePlacement) -> int:
    trace = Trials(problem.demand).build_trace(400, 4.0)
    return prediction.compute_whole_below_tokens(
        problem, draft, simulate(build_cell(problem, draft), trace), trace
    )


def with_tpot(tpot_ms: float) -> Problem:
    return replace(blog(), slo=Slo(ttft_ms=400, tpot_ms=tpot_ms))


def one_of_each(problem: Problem) -> CandidatePlacement:
    one = of_size(problem)
    return split(problem, one, 1, one, 1)


def test_the_pass_that_such_a_prompt_shares_keeps_the_tpot_target() -> None:
    problem = with_tpot(60)
    draft = one_of_each(problem)
    tokens = find(problem, draft)
    assert tokens.bit_count() == 1
    timing = draft.groups[1].instance.engine.timing
    assert timing.predict_iteration_ms([PromptChunk(0, tokens)], 4, 4 * 550) <= 60


def test_a_tighter_target_lets_fewer_prompts_through() -> None:
    loose, tight = (
        find(problem, one_of_each(problem)) for problem in (with_tpot(80), with_tpot(40))
    )
    assert loose > tight


def test_a_plan_without_a_split_has_no_use_for_it() -> None:
    problem = blog()
    assert find(problem, whole(problem, of_size(problem))) == 0


def test_a_plan_is_predicted_with_the_threshold_that_it_is_deployed_with() -> None:
    problem = known_problem(chat(6.0))
    draft = one_of_each(problem)
    search = SearchContext.from_problem(problem)
    plan = prediction.predict(search, draft, "Algorithm 1").plan
    assert plan.whole_below_tokens > 0
    deployed = build_deployed_cell(problem, draft, plan.whole_below_tokens)
    span = search.trials.compute_span(problem.rate, search.targets)
    served, without = (
        sample_service(search.trials, fleet, problem.rate, span, search.targets).attainment
        for fleet in (deployed, replace(deployed, short_prompt_tokens=0))
    )
    assert plan.prediction.attainment == served != without


@pytest.mark.parametrize(("error", "text"), [(0.0, "90 %"), (0.009, "90 %"), (0.031, "90 % +- 3")])
def test_an_error_of_more_than_a_point_is_shown(error: float, text: str) -> None:
    problem = known_problem(chat(6.0))
    plan = prediction.predict(SearchContext.from_problem(problem), one_of_each(problem), "").plan
    shown = replace(plan.prediction, attainment=0.9, attainment_error=error)
    assert format_attainment(shown) == text


def test_prompts_that_decode_instances_compute_raise_the_bound_of_the_rate() -> None:
    """Else the goodput of a plan whose prefill instances are full would be cut off."""
    problem = known_problem(chat(6.0))
    one = of_size(problem)
    fleet = build_cell(problem, split(problem, one, 1, one, 8))
    lengths = Trials(problem.demand).get_lengths()
    bound = capacity_bound.compute_fleet_rate(fleet, lengths)
    sharing = replace(fleet, short_prompt_tokens=512)
    assert capacity_bound.compute_fleet_rate(sharing, lengths) > bound
