"""What a loss costs a plan."""

import pytest

from cleave.api.deployment import Slo
from cleave.perf.estimate import Confidence, LatencySource
from cleave.planner.plan import Percentiles, Plan, Prediction
from cleave.planner.problem import Policies
from cleave.planner.result.recovery_cost import compute_loss_cost
from cleave.planner.search.candidate_placement import CandidatePlacement, to_planned_pools

from tests.support.known_problems import Kind, chat, nodes, of_size, problem, split, whole

GPU = "A100-SXM-80GB"
SLO = Slo(ttft_ms=1000, tpot_ms=60)


def build_problem():
    kinds = ((GPU, Kind()),)
    return problem(chat(8.0), SLO, policies=Policies(), supplies=(nodes(gpu=GPU),), kinds=kinds)


def planned(draft: CandidatePlacement, tpot_ms: float = 30.0) -> Plan:
    trust = Confidence(LatencySource.MEASURED, "DistServe's coefficients", None)
    tpot = Percentiles(tpot_ms, tpot_ms, tpot_ms)
    seen = Prediction(8.0, (8.0, 8.0), 0.9, tpot, tpot, tpot, 1.0, 1.0, trust)
    return Plan(to_planned_pools(draft), seen, "Algorithm 1", 1.0)


def test_streams_of_a_lost_decode_instance_are_shared_out_to_all_that_compute_prompts() -> None:
    question = build_problem()
    single = of_size(question)
    alone, four = (
        compute_loss_cost(question, planned(split(question, single, n, single, 2))) for n in (1, 4)
    )
    assert alone.pause_s == pytest.approx(4 * four.pause_s)
    assert alone.recompute_ms == four.recompute_ms


def test_fewer_streams_are_lost_where_more_instances_decode() -> None:
    question = build_problem()
    single = of_size(question)
    one, two = (
        compute_loss_cost(question, planned(split(question, single, 1, single, n))) for n in (1, 2)
    )
    streams = 8.0 * question.demand.mean_output_tokens * 0.030
    assert one.pause_s == pytest.approx(streams * one.recompute_ms / 1e3)
    assert one.pause_s == pytest.approx(2 * two.pause_s)


def test_mixed_instances_compute_what_the_lost_one_had() -> None:
    question = build_problem()
    two, three = (
        compute_loss_cost(question, planned(whole(question, of_size(question), n))) for n in (2, 3)
    )
    # Of three, two share a third of the streams; of two, one computes half of them.
    assert two.pause_s == pytest.approx(3 * three.pause_s)
