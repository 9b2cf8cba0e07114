"""What a loss costs a plan, and what checkpoints would change."""

import pytest

from cleave.api.deployment import Slo
from cleave.perf.estimate import Confidence, LatencySource
from cleave.planner.plan import Percentiles, Plan, Prediction
from cleave.planner.problem import Policies
from cleave.planner.result.recovery_cost import compare_checkpoints
from cleave.planner.search.candidate_placement import CandidatePlacement, to_planned_pools

from tests.support.known_problems import Kind, chat, nodes, of_size, problem, split, whole

GPU = "A100-SXM-80GB"
SLO = Slo(ttft_ms=1000, tpot_ms=60)


def build_problem(gpu: str = GPU):
    kinds = ((gpu, Kind()),)
    return problem(chat(8.0), SLO, policies=Policies(), supplies=(nodes(gpu=gpu),), kinds=kinds)


def planned(draft: CandidatePlacement, tpot_ms: float = 30.0) -> Plan:
    trust = Confidence(LatencySource.FITTED, "DistServe's coefficients", None)
    tpot = Percentiles(tpot_ms, tpot_ms, tpot_ms)
    seen = Prediction(8.0, (8.0, 8.0), 0.9, tpot, tpot, tpot, 1.0, 1.0, trust)
    return Plan(to_planned_pools(draft), seen, "Algorithm 1", 1.0)


def test_streams_of_a_lost_decode_instance_are_shared_out_to_all_that_compute_prompts() -> None:
    question = build_problem()
    single = of_size(question)
    alone, four = (
        compare_checkpoints(question, planned(split(question, single, n, single, 2)))
        for n in (1, 4)
    )
    assert alone.pause_s == pytest.approx(4 * four.pause_s)
    assert alone.resume_cost == four.resume_cost
    assert alone.resume_cost.restored_ms < alone.resume_cost.recompute_ms


def test_fewer_streams_are_lost_where_more_instances_decode() -> None:
    question = build_problem()
    single = of_size(question)
    one, two = (
        compare_checkpoints(question, planned(split(question, single, 1, single, n)))
        for n in (1, 2)
    )
    assert one.host_bytes == pytest.approx(2 * two.host_bytes)
    streams = 8.0 * question.demand.mean_output_tokens * 0.030
    context = question.demand.mean_prompt_tokens + question.demand.mean_output_tokens / 2
    kv_bytes = streams * context * question.shape.kv_bytes_per_token
    assert one.host_bytes == pytest.approx(kv_bytes)


def test_mixed_instances_compute_what_the_lost_one_had() -> None:
    question = build_problem()
    two, three = (
        compare_checkpoints(question, planned(whole(question, of_size(question), n)))
        for n in (2, 3)
    )
    assert two.pause_s / two.host_bytes == pytest.approx(2 * three.pause_s / three.host_bytes)


def test_of_gpus_in_no_catalogue_nothing_is_said() -> None:
    question = build_problem("unheard-of")
    single = of_size(question)
    assert compare_checkpoints(question, planned(split(question, single, 1, single, 1))) is None
