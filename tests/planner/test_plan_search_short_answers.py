"""Answers of one token, or hardly more: classifiers, guards, scoring."""

import math
from dataclasses import replace

import numpy as np
import pytest

from cleave.api.deployment import Slo
from cleave.api.planning import Affinity, Disaggregation, Planning
from cleave.planner import plan_search
from cleave.planner.plan import PlanVerdict
from cleave.planner.pool_simulation import to_candidate_placement
from cleave.planner.problem import Problem
from cleave.planner.search.candidate_placement import build_cell
from cleave.planner.search.capacity_bound import compute_fleet_rate
from cleave.planner.search.trials import Trials
from cleave.simulator.trace import Trace
from cleave.traffic.workload import (
    Demand,
    FixedLength,
    GeneratedRequests,
    IndependentLengths,
    LogNormal,
    build_from_trace,
)

from tests.support import known_problems

LOOSE = Slo(ttft_ms=2000, tpot_ms=100)


def record(rate: float, outputs: list[int], seed: int = 0) -> Demand:
    """Requests with these answers, one after the other and from the start again."""
    rng, num = np.random.default_rng(seed), 600
    return build_from_trace(
        Trace(
            np.cumsum(rng.exponential(1000 / rate, num)),
            rng.integers(50, 800, num),
            np.resize(np.array(outputs), num),
        )
    )


def draw_demand(seed: int) -> Demand:
    rng = np.random.default_rng(seed)
    rate, mean = math.exp(rng.uniform(-1, 5)), rng.uniform(1, 3)
    match seed % 3:
        case 0:
            outputs = FixedLength(mean)
        case 1:
            outputs = LogNormal.from_mean_and_p90(mean, mean * rng.uniform(1.05, 2))
        case _:
            return record(rate, [1] * int(rng.integers(1, 300)) + [2] * (seed % 2), seed)
    prompts = LogNormal.from_mean_and_p90(300, 600)
    return Demand(rate, GeneratedRequests(IndependentLengths(prompts, outputs))).with_max_model_len(
        2048
    )


def check(problem: Problem) -> None:
    """A plan serves the rate, and no more than its prompts and answers together allow."""
    answer = plan_search.plan(problem)
    for plan in filter(None, (answer.selected, *answer.alternatives)):
        draft = to_candidate_placement(problem, plan.pools, plan.algorithm, plan.cells)
        cell = build_cell(problem, draft)
        # Decode instances compute short prompts themselves.
        fleet = replace(cell, short_prompt_tokens=plan.whole_below_tokens)
        lengths = Trials(problem.demand).get_lengths(20_000)
        bound = draft.copies * compute_fleet_rate(fleet, lengths)
        goodput = plan.prediction.goodput
        assert math.isfinite(bound)
        assert 0 <= goodput <= bound * 1.05
    if answer.selected is None:
        assert answer.verdict is PlanVerdict.INFEASIBLE
    else:
        assert answer.selected.prediction.goodput >= problem.rate * 0.95


@pytest.mark.parametrize("seed", range(9))
def test_any_mix_of_short_answers_is_planned(seed: int) -> None:
    slo = LOOSE if seed % 4 else Slo(ttft_ms=60, tpot_ms=10)
    check(known_problems.problem(draw_demand(seed), slo))


def test_answers_of_one_token_are_planned_without_decode_instances() -> None:
    problem = known_problems.problem(record(60.0, [1]), LOOSE)
    answer = plan_search.plan(problem)
    assert answer.verdict is PlanVerdict.COLOCATE
    assert not any(each.is_disaggregated for each in answer.alternatives)
    assert "answers of one token have no decode phase" in answer.reason


@pytest.mark.parametrize("affinity", [Affinity.HIGH, Affinity.LOW])
def test_decode_instances_that_are_requested_for_answers_of_one_token_are_one(affinity) -> None:
    planning = Planning(affinity=affinity, disaggregation=Disaggregation.ALWAYS)
    problem = known_problems.problem(record(20.0, [1]), LOOSE, planning=planning)
    selected = plan_search.plan(problem).selected
    assert selected is not None
    assert [each.replicas for each in selected.pools if each.role == "decode"] == [1]
