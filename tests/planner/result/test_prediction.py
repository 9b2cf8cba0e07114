"""Predictions: which prompts a plan lets decode instances compute."""

from dataclasses import replace

from cleave.api.deployment import Slo
from cleave.perf.timing import PromptChunk
from cleave.planner.problem import Problem
from cleave.planner.result import prediction
from cleave.planner.search.candidate_placement import CandidatePlacement, build_cell_fleet
from cleave.planner.search.trials import Trials
from cleave.simulator.run import simulate

from tests.support.known_problems import blog, of_size, split, whole


def find(asked: Problem, draft: CandidatePlacement) -> int:
    trace = Trials(asked.demand).build_trace(400, 4.0)
    return prediction.compute_whole_below_tokens(
        asked, draft, simulate(build_cell_fleet(asked, draft), trace), trace
    )


def with_tpot(tpot_ms: float) -> Problem:
    return replace(blog(), slo=Slo(ttft_ms=400, tpot_ms=tpot_ms))


def one_of_each(asked: Problem) -> CandidatePlacement:
    one = of_size(asked)
    return split(asked, one, 1, one, 1)


def test_the_pass_that_such_a_prompt_shares_keeps_the_tpot_target() -> None:
    asked = with_tpot(60)
    draft = one_of_each(asked)
    tokens = find(asked, draft)
    assert tokens.bit_count() == 1
    timing = draft.groups[1].instance.engine.timing
    assert timing.predict_iteration_ms([PromptChunk(0, tokens)], 4, 4 * 550) <= 60


def test_a_tighter_target_lets_fewer_prompts_through() -> None:
    loose, tight = (find(asked, one_of_each(asked)) for asked in (with_tpot(80), with_tpot(40)))
    assert loose > tight


def test_a_plan_without_a_split_has_no_use_for_it() -> None:
    asked = blog()
    assert find(asked, whole(asked, of_size(asked))) == 0
