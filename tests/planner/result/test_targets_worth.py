"""What engines that keep targets would serve with a plan's instances."""

from dataclasses import replace

import pytest

from cleave.api.deployment import Slo
from cleave.planner.problem import Policies
from cleave.planner.result.prediction import predict
from cleave.planner.result.targets_worth import OVERLOAD, measure_worth_of_targets
from cleave.planner.search.candidate_placement import CandidatePlacement
from cleave.planner.search.context import SearchContext
from cleave.planner.search.trials import CONFIRMATION_PRECISION
from cleave.simulator.fleet import Admission, PrefillOrder

from tests.support.known_problems import Kind, chat, nodes, of_size, problem, split, whole

GPU = "A100-SXM-80GB"
DEFAULT = Policies()
KEEPS = Policies(order=PrefillOrder.IN_TIME, admission=Admission.WITHIN_TPOT)


def ask(policies: Policies = DEFAULT):
    slo, kinds = Slo(ttft_ms=1_000, tpot_ms=60), ((GPU, Kind()),)
    supplies = (nodes(gpu=GPU),)
    return problem(chat(8.0), slo, policies=policies, supplies=supplies, kinds=kinds)


def plan_for(placement: CandidatePlacement, question):
    search = SearchContext.from_problem(question).with_precision(CONFIRMATION_PRECISION)
    return predict(search, placement, "Algorithm 1").plan


@pytest.mark.parametrize("prefills", [0, 1])
def test_it_is_what_a_plan_with_these_engines_predicts(prefills) -> None:
    question, keeping = ask(), ask(KEEPS)
    single = of_size(question)

    def place(own) -> CandidatePlacement:
        # With three decode instances some prompts are short enough to be computed there.
        return split(own, single, 1, single, 3) if prefills else whole(own, single, 2)

    plan, kept = plan_for(place(question), question), plan_for(place(keeping), keeping)
    assert bool(plan.whole_below_tokens) == bool(prefills)
    worth = measure_worth_of_targets(question, plan)
    assert worth.goodput == pytest.approx(kept.prediction.goodput, rel=0.03)
    low, high = worth.goodput_interval
    assert low <= worth.goodput <= high


def test_an_overload_is_served_in_part() -> None:
    question = ask()
    plan = plan_for(whole(question, of_size(question), 2), question)
    worth = measure_worth_of_targets(question, plan)
    assert OVERLOAD > 1
    assert worth.overload_attainment > worth.own_overload_attainment + 0.3


def test_nothing_is_compared_where_engines_keep_targets_already() -> None:
    question = ask(KEEPS)
    plan = plan_for(whole(question, of_size(question), 2), question)
    assert measure_worth_of_targets(question, plan) is None
    (pool,) = plan.pools
    other = replace(plan, pools=(replace(pool, batching="PREFILL_FIRST"),))
    assert measure_worth_of_targets(ask(), other) is None
