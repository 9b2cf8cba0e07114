"""The whole search: verdicts, reasons, limits, known outcomes."""

import re
from dataclasses import replace
from functools import cache

import pytest

from cleave.api.deployment import Slo
from cleave.api.engine import Connector
from cleave.api.planning import Affinity, Disaggregation, Objective, Planning
from cleave.api.role import Role
from cleave.perf.hardware.link import Link, LinkKind
from cleave.planner import plan_search
from cleave.planner.placement import PlanError
from cleave.planner.plan import Plan, PlanningResult, PlanVerdict
from cleave.planner.problem import DISTSERVE_POLICIES, Policies, Problem
from cleave.planner.search import replication
from cleave.planner.search.candidates import list_candidates
from cleave.planner.search.context import SearchContext

from tests.support import known_problems, wide_problems


def replicas(plan: Plan) -> dict[Role, int]:
    return {pool.role: pool.replicas for pool in plan.pools}


def best(answer: PlanningResult) -> Plan:
    assert answer.selected is not None
    return answer.selected


@cache
def answer_blog(rate: float) -> PlanningResult:
    return plan_search.plan(known_problems.blog(rate))


def test_the_blogs_13b_case_is_disaggregated_at_ten_requests_per_second() -> None:
    # "Throughput is not all you need": split, one GPU per phase beats colocated GPUs.
    answer = answer_blog(10.0)
    assert answer.verdict is PlanVerdict.DISAGGREGATE
    assert replicas(best(answer)) == {Role.PREFILL: 1, Role.DECODE: 1}
    (colocated,) = (plan for plan in answer.alternatives if not plan.is_disaggregated)
    assert colocated.gpus > 2
    assert "the best colocated plan takes 3 GPUs instead of 2 GPUs" in answer.reason
    assert "from a TPOT target of" in answer.what_would_change


def test_no_target_is_named_for_colocated_plans_that_already_need_no_more() -> None:
    answer = answer_blog(6.0)
    assert answer.verdict is PlanVerdict.DISAGGREGATE
    assert "the best colocated plan needs as much and serves less" in answer.reason
    runner_up = r"the runner-up is 2M tp1 \(colocated, 2 GPUs, 8\.4\d req/s at most\)"
    assert re.fullmatch(runner_up, answer.what_would_change)


def test_deepseek_decodes_on_ranks_that_share_its_experts() -> None:
    problem = wide_problems.deepseek()
    answer = plan_search.plan(problem)
    decode = next(pool for pool in best(answer).pools if pool.role is Role.DECODE)
    assert decode.parallelism.data > 1
    assert decode.parallelism.expert
    without = plan_search.plan(replace(problem, shape=replace(problem.shape, experts=None)))
    assert best(answer).gpus < 0.8 * best(without).gpus


def test_one_request_per_second_is_not_worth_splitting() -> None:
    answer = answer_blog(1.0)
    assert answer.verdict is PlanVerdict.COLOCATE
    assert best(answer).gpus == 1
    assert answer.reason.startswith("do not disaggregate: ")
    assert "takes 2 GPUs instead of 1 GPU" in answer.reason
    assert any(plan.is_disaggregated for plan in answer.alternatives)


def test_the_selected_plan_holds_the_rate_and_its_prediction_hangs_together() -> None:
    chat = known_problems.problem(policies=Policies())
    for problem, answer in (
        (known_problems.blog(rate=10.0), answer_blog(10.0)),
        (chat, plan_search.plan(chat)),
    ):
        plan = best(answer)
        seen = plan.prediction
        low, high = seen.goodput_interval
        assert seen.attainment >= 0.9
        assert low <= seen.goodput <= high
        assert seen.goodput >= problem.rate * 0.97
        assert seen.ttft_ms.p50 <= seen.ttft_ms.p90 <= seen.ttft_ms.p99
        assert seen.tpot_ms.p50 <= seen.tpot_ms.p90 <= seen.tpot_ms.p99
        assert plan.score == pytest.approx(min(seen.goodput, problem.rate) / plan.gpus)
        assert plan.pools[0].max_num_seqs is not None


def test_predicted_percentiles_and_attainment_agree() -> None:
    plan = best(answer_blog(10.0))
    seen = plan.prediction
    assert (seen.ttft_ms.p90 <= 400 and seen.tpot_ms.p90 <= 40) == (seen.attainment >= 0.9)


def test_an_slo_that_nothing_meets_is_refused_and_the_nearest_one_is_not() -> None:
    problem = known_problems.problem(slo=Slo(ttft_ms=20, tpot_ms=10))
    answer = plan_search.plan(problem)
    assert answer.verdict is PlanVerdict.INFEASIBLE
    assert answer.selected is None
    assert answer.reason.startswith("infeasible: no plan meets TTFT 20.0 ms and TPOT 10.0 ms")
    nearest = answer.nearest_slo
    assert nearest is not None
    assert nearest.scale > 1
    longer = {nearest.ttft_ms / 20, nearest.tpot_ms / 10} - {1.0}
    assert max(longer) == pytest.approx(nearest.scale)
    looser = Slo(ttft_ms=nearest.ttft_ms * 1.1, tpot_ms=nearest.tpot_ms * 1.1)
    assert (
        plan_search.plan(known_problems.problem(slo=looser)).verdict is not PlanVerdict.INFEASIBLE
    )


def test_too_few_gpus_are_said_with_what_they_serve_and_how_many_it_would_take() -> None:
    problem = known_problems.problem(
        known_problems.chat(rate=60.0), supplies=(known_problems.nodes(1),)
    )
    answer = plan_search.plan(problem)
    assert answer.verdict is PlanVerdict.INFEASIBLE
    assert "is more than 8 GPUs serve" in answer.reason
    assert "about 11 GPUs" in answer.what_would_change
    assert all(plan.gpus <= 8 for plan in answer.alternatives)
    assert answer.alternatives[0].prediction.goodput < 60


def test_for_targets_in_seconds_their_thousandfold_is_suggested() -> None:
    answer = plan_search.plan(known_problems.problem(slo=Slo(ttft_ms=0.4, tpot_ms=0.03)))
    assert answer.nearest_slo is not None
    assert answer.nearest_slo.scale > 100
    assert answer.reason.endswith("TTFT and TPOT targets are in milliseconds: are these seconds?")
    assert "times as long would make it feasible" in answer.what_would_change


def test_where_no_multiple_was_found_to_hold_no_single_remedy_is_promised() -> None:
    slo = Slo(ttft_ms=20, tpot_ms=10)
    problem = known_problems.problem(
        known_problems.chat(rate=500.0), slo, supplies=(known_problems.nodes(1),)
    )
    answer = plan_search.plan(problem)
    assert answer.nearest_slo is None
    assert answer.reason.endswith("no multiple of this SLO was found that 8 GPUs hold at this rate")
    assert answer.what_would_change == (
        "faster GPUs, or a longer SLO together with a lower rate or more GPUs, would make it "
        "feasible"
    )


@pytest.mark.parametrize("ask", [Disaggregation.ALWAYS, Disaggregation.NEVER])
def test_the_disaggregation_mode_is_followed_and_reported(ask: Disaggregation) -> None:
    for rate in (1.0, 10.0):
        problem = known_problems.blog(rate=rate)
        answer = plan_search.plan(
            known_problems.problem(
                problem.demand, problem.slo, planning=Planning(disaggregation=ask)
            )
        )
        assert best(answer).is_disaggregated == (ask is Disaggregation.ALWAYS)
        assert f"disaggregation: {ask.value} was requested" in answer.reason


def test_the_best_colocated_plan_is_reported_even_when_splitting_is_required() -> None:
    problem = known_problems.blog(rate=10.0)
    planning = Planning(disaggregation=Disaggregation.ALWAYS)
    answer = plan_search.plan(
        known_problems.problem(problem.demand, problem.slo, planning=planning)
    )
    assert any(not plan.is_disaggregated for plan in answer.alternatives)


def test_a_slow_network_keeps_kv_in_its_node_and_a_fast_one_does_not() -> None:
    always = Planning(disaggregation=Disaggregation.ALWAYS)
    slow = known_problems.nodes(2, network=known_problems.SLOW_NETWORK, gpus_per_node=4)
    algorithms = {
        name: best(plan_search.plan(problem)).algorithm
        for name, problem in {
            "slow": known_problems.problem(supplies=(slow,), planning=always),
            "fast": known_problems.problem(
                supplies=(known_problems.nodes(2, gpus_per_node=4),), planning=always
            ),
            "told": known_problems.problem(
                supplies=(slow,),
                planning=Planning(
                    disaggregation=Disaggregation.ALWAYS, affinity=Affinity.HIGH, max_gpus=8
                ),
            ),
        }.items()
    }
    assert algorithms == {"slow": "Algorithm 2", "fast": "Algorithm 1", "told": "Algorithm 1"}


def has_cells(link: Link | None, planning: Planning | None = None) -> Problem:
    """Two nodes with a slow network, on which cells that are one pod have `link`."""
    network = known_problems.SLOW_NETWORK
    pods = known_problems.nodes(2, network=network, gpus_per_node=4)
    pods = replace(pods, node_link=network, cell_link=link)
    policies = replace(DISTSERVE_POLICIES, connector=Connector.CLEAVE)
    problem = known_problems.blog(rate=10.0, policies=policies)
    return replace(problem, supplies=(pods,), planning=planning or Planning())


def test_cells_that_are_one_pod_need_fewer_gpus_where_their_link_was_seen() -> None:
    plan = best(plan_search.plan(has_cells(known_problems.NVLINK)))
    assert plan.algorithm == "Algorithm 2"
    assert plan.prediction.kv_link is not None
    assert plan.prediction.kv_link.kind is LinkKind.NVLINK
    unseen = best(plan_search.plan(has_cells(None)))
    assert unseen.gpus > plan.gpus


@pytest.mark.parametrize(
    "planning",
    [Planning(affinity=Affinity.HIGH), Planning(disaggregation=Disaggregation.NEVER)],
)
def test_what_was_requested_leaves_no_cells_to_choose(planning: Planning) -> None:
    answer = plan_search.plan(has_cells(known_problems.NVLINK, planning))
    assert all(each.algorithm != "Algorithm 2" for each in answer.plans)


def mixed_problem(objective: Objective) -> Problem:
    """H100: prompts in half the time, decoding hardly faster, 1.5 times the price."""
    return known_problems.problem(
        known_problems.blog().demand.with_rate(60.0),
        known_problems.blog().slo,
        supplies=(known_problems.nodes(2), known_problems.nodes(2, gpu="H100")),
        planning=Planning(objective=objective),
        kinds=(("H100", known_problems.Kind(0.5, 0.95, power_watts=700.0, price_per_hour=3.0)),),
    )


@cache
def answer_mixed(objective: Objective) -> PlanningResult:
    return plan_search.plan(mixed_problem(objective))


def test_different_gpus_for_prefill_and_decode_are_chosen_where_they_cost_least() -> None:
    # Splitwise, section VI: H100 for prompts, A100 for tokens (Splitwise-HA).
    plan = best(answer_mixed(Objective.COST))
    assert {pool.role: pool.gpu for pool in plan.pools} == {
        Role.PREFILL: "H100",
        Role.DECODE: "A100",
    }
    assert plan.score == pytest.approx(60 / plan.prediction.cost_per_hour)


def test_with_several_kinds_of_gpu_the_best_colocated_plan_of_each_is_shown() -> None:
    problem = known_problems.problem(
        known_problems.blog().demand,
        known_problems.blog().slo,
        supplies=(known_problems.nodes(1), known_problems.nodes(1, gpu="H100")),
    )
    plans = plan_search.plan(problem).plans
    colocated = [{pool.gpu for pool in plan.pools} for plan in plans if not plan.is_disaggregated]
    assert sorted(colocated, key=str) == [{"A100"}, {"H100"}]


def test_different_gpus_fill_the_nodes_where_one_kind_has_no_room_for_both_phases() -> None:
    problem = known_problems.problem(
        known_problems.chat(rate=60.0),
        supplies=(
            known_problems.nodes(1, gpus_per_node=1),
            known_problems.nodes(1, gpus_per_node=1, gpu="H100"),
        ),
        planning=Planning(disaggregation=Disaggregation.ALWAYS),
    )
    answer = plan_search.plan(problem)
    (split,) = (plan for plan in answer.alternatives if plan.is_disaggregated)
    assert {pool.gpu for pool in split.pools} == {"A100", "H100"}
    assert split.prediction.goodput > 5


def test_the_objective_decides() -> None:
    plans = {each: best(answer_mixed(each)) for each in Objective}
    least_gpus, cheapest = plans[Objective.GOODPUT_PER_GPU], plans[Objective.COST]
    least_power = plans[Objective.POWER]
    assert least_gpus.gpus <= min(cheapest.gpus, least_power.gpus)
    assert cheapest.prediction.cost_per_hour <= least_gpus.prediction.cost_per_hour
    assert least_power.prediction.power_watts <= least_gpus.prediction.power_watts


def test_limits_on_gpus_are_respected() -> None:
    problem = known_problems.problem(known_problems.chat(rate=20.0), planning=Planning(max_gpus=5))
    for plan in (answer := plan_search.plan(problem)).alternatives:
        assert plan.gpus <= 5
    assert answer.selected is None or answer.selected.gpus <= 5


def test_equal_questions_get_equal_answers() -> None:
    one, other = (plan_search.plan(known_problems.problem(seed=5)) for _ in range(2))
    assert one.selected == other.selected
    assert one.alternatives == other.alternatives
    assert (one.reason, one.num_simulated_requests) == (other.reason, other.num_simulated_requests)


def test_progress_only_rises_and_never_reaches_the_end_too_soon() -> None:
    seen: list[tuple[int, int, str]] = []
    plan_search.plan(known_problems.problem(), lambda *step: seen.append(step))
    done = [step[0] for step in seen]
    assert done == sorted(done)
    assert all(step[0] < step[1] and step[2] for step in seen)


def test_many_gpus_take_simulation_in_proportion_to_the_rate_and_not_a_gpu_too_many() -> None:
    slo = Slo(ttft_ms=300, tpot_ms=45)
    answers = {
        num: plan_search.plan(
            known_problems.problem(
                known_problems.chat(25.0 * num), slo, supplies=(known_problems.nodes(num),)
            )
        )
        for num in (4, 16)
    }
    assert best(answers[16]).gpus > 64
    # Large fleets even chance out: they never take more per request.
    assert best(answers[16]).gpus <= 4 * best(answers[4]).gpus
    assert answers[16].num_simulated_requests < 5 * answers[4].num_simulated_requests
    assert best(answers[16]).prediction.goodput < 400 * 1.03


def test_a_model_that_fits_nowhere_is_one_fault_with_the_miss() -> None:
    problem = known_problems.problem(
        model="opt-66b", supplies=(known_problems.nodes(1, gpus_per_node=1),)
    )
    with pytest.raises(PlanError) as raised:
        plan_search.plan(problem)
    (fault,) = raised.value.faults
    assert fault.startswith("spec.model: opt-66b: ")


def test_an_objective_without_prices_is_one_fault_with_the_remedy() -> None:
    problem = known_problems.problem(
        planning=Planning(objective=Objective.COST),
        kinds=(("A100", known_problems.Kind(price_per_hour=0.0)),),
    )
    with pytest.raises(PlanError) as raised:
        plan_search.plan(problem)
    assert raised.value.faults == (
        "spec.planning.objective: Cost needs the price of A100; set it, or choose GoodputPerGPU",
    )


def test_notes_of_the_caller_are_returned_as_warnings() -> None:
    problem = known_problems.problem()
    noted = type(problem)(
        **{name: getattr(problem, name) for name in problem.__slots__ if name != "notes"},
        notes=("few requests",),
    )
    assert "few requests" in plan_search.plan(noted).warnings


def test_a_plan_far_above_the_rate_says_where_the_search_ended() -> None:
    fast = (("fast", known_problems.Kind(prompt=1e-4, decode=1e-4)),)
    supplies = (known_problems.nodes(num_nodes=1, gpu="fast"),)
    problem = known_problems.problem(known_problems.chat(3.0), supplies=supplies, kinds=fast)
    answer = plan_search.plan(problem)
    assert best(answer).prediction.goodput == pytest.approx(500, rel=0.02)
    assert any("no rate above 500 req/s was tried" in each for each in answer.warnings)
    assert answer.num_simulated_requests < 10_000_000


def test_a_plan_of_very_many_gpus_consists_of_equal_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = known_problems.problem(known_problems.chat(120.0))
    whole = plan_search.plan(problem)
    monkeypatch.setattr(replication, "PART_GPUS", 8)
    divided = plan_search.plan(problem)
    assert divided.verdict is whole.verdict
    assert best(whole).gpus <= best(divided).gpus <= 1.2 * best(whole).gpus
    assert best(divided).prediction.goodput >= problem.rate * 0.97
    assert any("simulated as one of 2 equal cells" in each for each in divided.warnings)


def test_parts_use_the_nodes_that_do_not_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    never = Planning(disaggregation=Disaggregation.NEVER)
    five = (known_problems.nodes(5),)
    problem = known_problems.problem(known_problems.chat(200.0), supplies=five, planning=never)
    monkeypatch.setattr(replication, "PART_GPUS", 8)
    plan = best(plan_search.plan(replace(problem, max_nodes_per_instance=1)))
    assert 32 < plan.gpus <= 40


def test_parts_take_no_more_nodes_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnFive(known_problems.Fits):
        def estimate(self, gpu, tensor, pipeline, data=1, *, expert=False):
            return super().estimate(gpu, 4, 1) if (tensor, pipeline) == (5, 1) else None

    never = Planning(disaggregation=Disaggregation.NEVER)
    five = (known_problems.nodes(5),)
    problem = known_problems.problem(known_problems.chat(200.0), supplies=five, planning=never)
    monkeypatch.setattr(replication, "PART_GPUS", 8)
    result = plan_search.plan(replace(problem, estimator=OnFive()))
    assert result.best is not None
    assert [pool.replicas for pool in result.best.pools] == [4]


def test_what_few_gpus_serve_is_searched_as_a_whole() -> None:
    problem = known_problems.problem(known_problems.chat(1e6))
    search = SearchContext.from_problem(problem)
    assert replication.count_parts(search, list_candidates(problem)) == 1
