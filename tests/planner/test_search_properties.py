"""What holds for every plan, over questions that have little in common."""

from dataclasses import replace
from functools import cache

import pytest

from cleave.api.deployment import Slo
from cleave.api.planning import Affinity, Disaggregation, Objective, Planning
from cleave.planner import plan_search
from cleave.planner.plan import Plan, PlanningResult
from cleave.planner.pool_simulation import to_candidate_placement
from cleave.planner.problem import Policies, Problem
from cleave.planner.search.candidate_placement import build_cell
from cleave.planner.search.trials import Precision, Trials

from tests.support import known_problems

KINDS = (("H100", known_problems.Kind(0.5, 0.7, power_watts=700.0, price_per_hour=3.0)),)
BOTH = (known_problems.nodes(4), known_problems.nodes(4, gpu="H100"))
SLOW = (known_problems.nodes(4, network=known_problems.SLOW_NETWORK),)
BLOG = known_problems.blog()

PROBLEMS = {
    "chat": known_problems.problem(),
    "chat, vLLM": known_problems.problem(policies=Policies()),
    "few": known_problems.problem(known_problems.chat(0.5)),
    "many": known_problems.problem(
        known_problems.chat(150.0), supplies=(known_problems.nodes(16),)
    ),
    "tight": known_problems.problem(known_problems.chat(12.0), Slo(ttft_ms=120, tpot_ms=40)),
    "loose": known_problems.problem(known_problems.chat(12.0), Slo(ttft_ms=2000, tpot_ms=150)),
    "blog": replace(BLOG, demand=BLOG.demand.with_rate(10.0)),
    "long answers": known_problems.problem(known_problems.chat(6.0, 200, 500)),
    "long prompts": known_problems.problem(
        known_problems.chat(8.0, 1000, 60), Slo(ttft_ms=800, tpot_ms=60)
    ),
    "slow network": known_problems.problem(
        known_problems.chat(20.0),
        supplies=SLOW,
        planning=Planning(affinity=Affinity.LOW, disaggregation=Disaggregation.ALWAYS),
    ),
    "cost": known_problems.problem(
        known_problems.chat(30.0),
        supplies=BOTH,
        planning=Planning(objective=Objective.COST),
        kinds=KINDS,
    ),
    "99 %": known_problems.problem(slo=Slo(ttft_ms=400, tpot_ms=100, attainment=0.99)),
}


@cache
def answered(name: str) -> PlanningResult:
    return plan_search.plan(PROBLEMS[name])


def best(answer: PlanningResult) -> Plan:
    assert answer.selected is not None
    return answer.selected


@pytest.mark.parametrize("name", PROBLEMS)
def test_other_requests_are_served_in_time_too(name: str) -> None:
    problem, plan = PROBLEMS[name], best(answered(name))
    draft = to_candidate_placement(problem, plan.pools, plan.algorithm)
    long = Precision(min_requests=20_000, lifetimes=10.0)
    trials, rate = Trials(problem.demand, seed=4711, precision=long), problem.rate / draft.copies
    targets = known_problems.targets(problem)
    span = trials.compute_span(rate, targets)
    shares = trials.measure_shares(build_cell(problem, draft), rate, targets, span)
    assert shares.both >= problem.slo.attainment - 0.015


@pytest.mark.parametrize("name", ["chat", "blog", "long prompts"])
def test_twice_the_rate_never_takes_fewer_gpus(name: str) -> None:
    problem = PROBLEMS[name]
    doubled = plan_search.plan(replace(problem, demand=problem.demand.with_rate(2 * problem.rate)))
    assert best(doubled).gpus >= best(answered(name)).gpus


@pytest.mark.parametrize("name", ["tight", "blog", "long answers"])
def test_targets_half_as_strict_never_take_more_gpus(name: str) -> None:
    problem = PROBLEMS[name]
    slo = Slo(
        ttft_ms=2 * problem.slo.ttft_ms,
        tpot_ms=2 * problem.slo.tpot_ms,
        attainment=problem.slo.attainment,
    )
    assert best(plan_search.plan(replace(problem, slo=slo))).gpus <= best(answered(name)).gpus


@pytest.mark.parametrize("objective", list(Objective))
def test_one_more_kind_of_gpu_never_makes_the_best_plan_worse(objective: Objective) -> None:
    one = known_problems.problem(
        known_problems.chat(20.0),
        supplies=BOTH[:1],
        planning=Planning(objective=objective),
        kinds=KINDS,
    )
    other = replace(one, supplies=BOTH)

    def measure_cost(problem: Problem) -> float:
        plan = best(plan_search.plan(problem))
        return to_candidate_placement(problem, plan.pools, plan.algorithm).get_resources(objective)

    assert measure_cost(other) <= measure_cost(one)


@pytest.mark.parametrize("name", PROBLEMS)
def test_no_plan_is_listed_twice_and_none_takes_more_than_there_is(name: str) -> None:
    answer = answered(name)
    plans = [best(answer), *answer.alternatives]
    sizes = [tuple((p.role, p.gpu, p.parallelism, p.replicas) for p in x.pools) for x in plans]
    assert len(set(sizes)) == len(sizes)
    assert all(plan.gpus <= PROBLEMS[name].max_gpus for plan in plans)
