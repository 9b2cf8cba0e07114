"""How plans grow: Aladdin's laws for one question."""

import json

import pytest

from cleave.api.deployment import Slo
from cleave.perf.estimate import Confidence, LatencySource
from cleave.planner.plan import Percentiles, Plan, Prediction
from cleave.planner.problem import Policies, Problem
from cleave.planner.scaling_law import growth
from cleave.planner.scaling_law.aladdin import ScalingError
from cleave.planner.search.candidate_placement import CandidatePlacement, to_planned_pools

from tests.support.known_problems import Kind, chat, nodes, of_size, problem, split, whole

NEVER = Percentiles(1.0, 1.0, 1.0)
SLO = Slo(ttft_ms=1000, tpot_ms=60)


def build_problem(rate: float = 10.0, **fields) -> Problem:
    return problem(chat(rate), SLO, policies=Policies(), **fields)


def planned(draft: CandidatePlacement, goodput: float, algorithm: str) -> Plan:
    trust = Confidence(LatencySource.MEASURED, "DistServe's coefficients", None)
    seen = Prediction(goodput, (goodput, goodput), 0.9, NEVER, NEVER, NEVER, 1.0, 1.0, trust)
    return Plan(to_planned_pools(draft), seen, algorithm, 1.0)


def test_the_best_worker_is_of_the_kind_of_gpu_that_decodes_most() -> None:
    slow, fast = nodes(gpu="A100"), nodes(gpu="H100")
    kinds = (("H100", Kind(decode=0.5)),)
    best = growth.find_best_size(build_problem(supplies=(slow, fast), kinds=kinds))
    assert best.gpu == "H100"
    speeds = [size.tokens_per_s_per_gpu for size in best.sizes]
    assert speeds == sorted(speeds, reverse=True)
    assert growth.find_best_size(build_problem()).sizes[0].tokens_per_s_per_gpu < speeds[0]


def test_no_worker_is_larger_than_the_gpus_that_may_be_used() -> None:
    best = growth.find_best_size(build_problem(supplies=(nodes(max_gpus=2),)))
    assert {size.gpus for size in best.sizes} == {1, 2}


def test_a_target_that_no_worker_meets_is_reported() -> None:
    tight = problem(chat(), Slo(ttft_ms=1000, tpot_ms=1))
    with pytest.raises(ScalingError, match="tpot_ms 1: no worker"):
        growth.find_best_size(tight)


def test_a_worker_is_the_smallest_part_of_the_plan_with_its_proportion() -> None:
    question = build_problem(20.0)
    single = of_size(question)
    draft = split(question, single, 4, single, 2)
    found = growth.fit_growth(question, planned(draft, 20.0, "Algorithm 1"))
    assert [pool.replicas for pool in found.worker] == [2, 1]


def test_a_plan_reports_its_number_of_workers() -> None:
    question = build_problem(20.0)
    single = of_size(question)
    plan = planned(split(question, single, 4, single, 2), 20.0, "Algorithm 1")
    plan_growth = growth.to_plan_growth(question, plan)
    assert plan_growth is not None
    found = growth.fit_growth(question, plan).law
    assert plan_growth.workers == 2
    assert (plan_growth.per_rate, plan_growth.base, plan_growth.lowest_rate) == (
        found.k5,
        found.c5,
        found.lowest_rate,
    )


@pytest.mark.parametrize("algorithm", ["Algorithm 1", "Algorithm 2", "colocated"])
def test_the_line_undercuts_no_count_and_counts_rise_with_the_rate(algorithm) -> None:
    question = build_problem(8.0)
    single = of_size(question)
    draft = (
        whole(question, single, 4)
        if algorithm == "colocated"
        else split(question, single, 2, single, 2)
    )
    found = growth.fit_growth(question, planned(draft, 9.0, algorithm))
    assert list(found.counts) == [4.5, 9.0, 18.0, 27.0, 36.0]
    counts = list(found.counts.values())
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
    assert all(
        found.law.compute_workers(rate) - count in (0, 1) for rate, count in found.counts.items()
    )
    assert found.law.lowest_rate > 0


def test_both_laws_can_be_written_as_json() -> None:
    question = build_problem()
    plan = planned(whole(question, of_size(question), 2), 10.0, "colocated")
    document = growth.build_document(question, plan)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["workers"]["worker"] == "1M tp1"
    assert document["workerSizes"]["sizes"][0]["gpus"] >= 1


def test_a_law_that_cannot_be_said_is_null() -> None:
    tight = problem(chat(), Slo(ttft_ms=1000, tpot_ms=1), policies=Policies())
    plan = planned(whole(tight, of_size(tight)), 10.0, "colocated")
    assert growth.build_document(tight, plan) == {"workerSizes": None, "workers": None}
