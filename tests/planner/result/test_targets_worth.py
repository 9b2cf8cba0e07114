"""What engines that keep targets would serve with a plan's instances."""

from dataclasses import replace

import pytest

from cleave.api.deployment import Slo
from cleave.planner.problem import Policies
from cleave.planner.result.prediction import predict
from cleave.planner.result.targets_worth import measure_worth_of_targets
from cleave.planner.search.candidate_placement import CandidatePlacement
from cleave.planner.search.context import SearchContext
from cleave.simulator.fleet import Admission, PrefillOrder

from tests.support.known_problems import Kind, chat, nodes, of_size, problem, split, whole

GPU = "A100-SXM-80GB"
QUESTION = problem(
    chat(8.0),
    Slo(ttft_ms=1_000, tpot_ms=60),
    policies=Policies(),
    supplies=(nodes(gpu=GPU),),
    kinds=((GPU, Kind()),),
)
KEEPS = Policies(order=PrefillOrder.IN_TIME, admission=Admission.WITHIN_TPOT)


def plan_for(placement: CandidatePlacement, question=QUESTION):
    return predict(SearchContext.from_problem(question), placement, "Algorithm 1").plan


@pytest.mark.parametrize("is_split", [False, True])
def test_the_same_instances_serve_more_in_time_and_an_overload_in_part(is_split) -> None:
    single = of_size(QUESTION)
    placement = split(QUESTION, single, 1, single, 1) if is_split else whole(QUESTION, single, 2)
    plan = plan_for(placement)
    worth = measure_worth_of_targets(QUESTION, plan)
    assert worth.goodput == pytest.approx(plan.prediction.goodput, rel=0.15)
    assert worth.goodput_kept >= 0.98 * worth.goodput
    assert worth.overload_attainment < QUESTION.slo.attainment
    assert worth.overload_attainment_kept > worth.overload_attainment


def test_nothing_is_compared_where_engines_keep_targets_already() -> None:
    question = replace(QUESTION, policies=KEEPS)
    plan = plan_for(whole(question, of_size(question), 2), question)
    assert measure_worth_of_targets(question, plan) is None
