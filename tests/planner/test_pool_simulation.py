"""Simulating pools that somebody has chosen."""

import math
from dataclasses import replace

import pytest

from cleave.api.role import Parallelism, Role
from cleave.perf.hardware.link import Link, LinkKind
from cleave.planner.placement import PlanError
from cleave.planner.plan import EMULATED_GPU, LOW_AFFINITY, PlannedPool
from cleave.planner.pool_simulation import (
    PlacementSimulator,
    build_fleet,
    compute_mfu,
    to_candidate_placement,
)
from cleave.planner.result.prediction import predict
from cleave.planner.result.simulation_summary import list_instance_names, summarize
from cleave.planner.search.candidate_placement import to_planned_pools
from cleave.planner.search.context import SearchContext

from tests.support import known_problems, wide_problems
from tests.support.emulated_chat import chat


@pytest.fixture
def problem():
    return chat()


PAIR = (PlannedPool(Role.DECODE, 1), PlannedPool(Role.PREFILL, 2))


def test_instances_are_numbered_prefill_first(problem) -> None:
    assert list_instance_names(build_fleet(problem, PAIR)) == ["prefill-0", "prefill-1", "decode-0"]


def test_cells_that_are_one_pod_have_the_gpus_own_link(problem) -> None:
    nvlink = Link(LinkKind.NVLINK, 600.0)
    supplies = tuple(replace(supply, cell_link=nvlink) for supply in problem.supplies)
    cells = [replace(pool, per_cell=pool.replicas) for pool in PAIR]
    apart, within = (
        build_fleet(replace(problem, supplies=supplies), each) for each in (PAIR, cells)
    )
    assert within.transfer.token_ms < apart.transfer.token_ms
    assert replace(within, transfer=apart.transfer) == apart


def test_pools_without_limits_have_the_engines_defaults(problem) -> None:
    default_fleet = build_fleet(problem, PAIR)
    engine = default_fleet.prefill[0].engine
    assert (engine.max_num_seqs, engine.max_num_batched_tokens) == (256, 2048)
    limited_fleet = build_fleet(
        problem, [replace(PAIR[0], max_num_seqs=7, max_num_batched_tokens=99)]
    )
    engine = limited_fleet.decode[0].engine
    assert (engine.max_num_seqs, engine.max_num_batched_tokens) == (7, 99)


def test_what_the_engines_arguments_state_comes_first(problem) -> None:
    pools = (PlannedPool(Role.MIXED, 1, max_num_seqs=64, max_num_batched_tokens=512),)
    limited = replace(problem, policies=replace(problem.policies, max_num_seqs=16))
    engine = build_fleet(limited, pools).mixed[0].engine
    assert (engine.max_num_seqs, engine.max_num_batched_tokens) == (16, 512)


def test_parallelism_that_the_model_does_not_take_is_one_line(problem) -> None:
    with pytest.raises(PlanError, match=r"^spec.placement.manual: decode: ") as refused:
        build_fleet(problem, [PlannedPool(Role.DECODE, 1, Parallelism(tensor=3))])
    assert len(refused.value.faults) == 1


def test_a_digest_agrees_with_its_outcome(problem) -> None:
    served = build_fleet(problem, PAIR)
    outcome = PlacementSimulator(problem, 500).simulate(served, 4.0)
    found = summarize(outcome, served, 4.0, problem.slo, compute_mfu(problem, PAIR, outcome))
    assert found.attainment == outcome.compute_attainment(400, 40)
    assert found.attainment <= min(found.ttft_attainment, found.tpot_attainment)
    assert sum(stage.share for stage in found.stages) == pytest.approx(1)
    assert found.latency_ms.p50 <= found.latency_ms.p90 <= found.latency_ms.p99
    assert all(0 < each.busy <= 1 for each in found.instances)
    assert [each.name for each in found.instances] == list_instance_names(served)
    assert (found.num_too_long, found.num_unfinished) == (0, 0)
    assert all(math.isnan(each.mfu) for each in found.instances)


def test_mfu_is_the_work_of_all_tokens_by_what_the_gpus_of_an_instance_could_do(problem) -> None:
    known = replace(problem.estimator.estimate(EMULATED_GPU, 1, 1), peak_flops=312e12)

    class Estimator:
        def estimate(self, *_, **__):
            return known

    problem = replace(problem, estimator=Estimator())
    outcome = PlacementSimulator(problem, 200).simulate(build_fleet(problem, PAIR), 4.0)
    seen = outcome.instances
    found = compute_mfu(problem, PAIR, outcome)
    could = 312e12 * seen.duration_ms / 1000
    work = (seen.prompt_tokens + seen.decode_tokens) * problem.shape.flops_per_token
    assert found == pytest.approx(work / could)
    assert all(0 < each < 1 for each in found)


def test_the_same_seed_serves_the_same_requests_at_every_rate(problem) -> None:
    bench = PlacementSimulator(problem, 200)
    slow, fast = (bench.simulate(build_fleet(problem, PAIR), rate) for rate in (1.0, 8.0))
    assert (slow.output_tokens == fast.output_tokens).all()
    assert slow.arrival_ms == pytest.approx(8 * fast.arrival_ms)


def test_pools_name_their_kind_of_gpu_where_there_are_several(problem) -> None:
    (supply,) = problem.supplies
    kinds = ("A100-SXM-80GB", "H100-SXM-80GB")
    estimate = problem.estimator.estimate(EMULATED_GPU, 1, 1)

    class Estimator:
        def estimate(self, gpu, *_, **__):
            return estimate if gpu in kinds else None

    supplies = tuple(replace(supply, gpu=kind) for kind in kinds)
    problem = replace(problem, supplies=supplies, estimator=Estimator())
    found = build_fleet(problem, [PlannedPool(Role.MIXED, 1, gpu="NVIDIA-H100-80GB-HBM3")])
    assert found.mixed[0].replicas == 1
    for gpu, fault in (
        (None, "set one of A100-SXM-80GB, H100-SXM-80GB"),
        ("L4", "the nodes have no L4, only A100-SXM-80GB"),
        ("abacus", "unknown GPU 'abacus'"),
    ):
        with pytest.raises(PlanError, match=f"^spec.placement.manual: mixed: gpu: {fault}"):
            build_fleet(problem, [PlannedPool(Role.MIXED, 1, gpu=gpu)])


def test_emulated_instances_run_on_any_declared_gpu(problem) -> None:
    pools = [PlannedPool(Role.MIXED, 2, gpu="H100")]
    assert build_fleet(problem, pools).mixed[0].replicas == 2


def test_a_plan_of_equal_parts_is_simulated_as_one_of_them_at_its_share_of_the_rate() -> None:
    problem = known_problems.problem(known_problems.chat(6.0))
    part = known_problems.whole(problem, known_problems.of_size(problem), 3)
    search = SearchContext.from_problem(problem)
    whole = predict(search, part.with_copies(4), "colocated").plan
    assert to_candidate_placement(problem, whole.pools, whole.algorithm, whole.cells).copies == 4
    bench = PlacementSimulator(problem)
    outcome = bench.simulate_plan(whole, 6.0)
    assert len(outcome.instances.busy_ms) == 3
    alone = bench.simulate_plan(replace(whole, pools=to_planned_pools(part), cells=1), 1.5)
    assert (outcome.end_ms == alone.end_ms).all()


def test_as_many_requests_are_simulated_as_show_that_a_fleet_is_too_small(problem) -> None:
    rate, fleet = 500.0, build_fleet(problem, PAIR)
    usual, given = (
        PlacementSimulator(problem, 200, is_least=is_least).simulate(fleet, rate)
        for is_least in (True, False)
    )
    assert len(usual.arrival_ms) > 10_000
    assert len(given.arrival_ms) == 200


@pytest.mark.parametrize(("per_cell", "copies"), [(None, 2), (2, 1), (1, 2)])
def test_pools_have_as_many_cells_as_they_say(problem, per_cell: int | None, copies: int) -> None:
    pools = [replace(pool, replicas=2, per_cell=per_cell) for pool in PAIR]
    assert to_candidate_placement(problem, pools, LOW_AFFINITY).copies == copies


def test_ranks_are_simulated_one_by_one_and_counted_as_one_instance() -> None:
    wide = wide_problems.deepseek()
    pools = [
        PlannedPool(Role.PREFILL, 1, Parallelism(tensor=8, expert=True)),
        PlannedPool(Role.DECODE, 2, Parallelism(data=8, expert=True)),
    ]
    fleet = build_fleet(wide, pools)
    assert (fleet.decode[0].replicas, fleet.decode[0].engines) == (2, 16)
    assert list_instance_names(fleet) == ["prefill-0", *(f"decode-{n}" for n in range(16))]
    outcome = PlacementSimulator(wide, 100).simulate(fleet, 4.0)
    mfu = compute_mfu(wide, pools, outcome)
    assert len(mfu) == len(outcome.instances.iterations) == 17
    assert (outcome.instances.decode_tokens[1:] > 0).all()
    with pytest.raises(PlanError, match=r"decode: pipeline stages are not predicted with data"):
        build_fleet(wide, [PlannedPool(Role.DECODE, 1, Parallelism(pipeline=2, data=8))])
