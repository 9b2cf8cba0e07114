"""What prompts that repeat are worth to a plan."""

import re
from dataclasses import replace
from functools import cache

from cleave.api.role import Role
from cleave.planner import plan_search
from cleave.planner.plan import PlanningResult
from cleave.planner.problem import Policies
from cleave.planner.result import prediction
from cleave.planner.result.reuse import compare_with_blind, estimate_host_memory
from cleave.planner.result.status import build_document
from cleave.planner.search.candidate_placement import CandidatePlacement, InstanceGroup
from cleave.planner.search.candidates import PlannedInstance, list_candidates
from cleave.simulator.fleet import Batching, SimulatedFleet, SimulatedPool
from cleave.simulator.run import simulate
from cleave.simulator.trace import Trace
from cleave.traffic.conversations import Conversations
from cleave.traffic.reuse_curve import measure_reuse
from cleave.traffic.reuse_fit import get_repeated_share
from cleave.traffic.workload import Demand

from tests.support import known_problems


@cache
def plan(is_known: bool = True) -> PlanningResult:
    chat = known_problems.chat(prompt=900, output=60)
    source = replace(chat.source, conversations=Conversations(8, 40, 64))
    demand = Demand(12.0, source, 2048)
    if not is_known:
        demand = demand.without_reuse()
    one_node = (known_problems.nodes(1),)
    problem = known_problems.problem(demand, supplies=one_node, policies=Policies())
    return plan_search.plan(problem)


def test_a_plan_that_knows_of_reuse_needs_fewer_gpus_and_says_what_is_saved() -> None:
    known, blind = plan(), plan(is_known=False)
    assert known.selected is not None
    assert blind.selected is not None
    assert known.reuse is not None
    assert known.selected.gpus < blind.selected.gpus
    assert known.reuse.gpus == known.selected.gpus
    assert known.reuse.gpus_without == blind.selected.gpus
    assert known.reuse.cached_share == known.selected.prediction.cached_share > 0.2
    assert "% of the prompt tokens are in prefix caches; without reuse " in known.reuse.text
    assert known.reuse.text.endswith(f" instead of {known.selected.gpus} GPUs")
    assert known.selected.prediction.attainment >= 0.9


def test_what_reuse_is_worth_takes_no_predictions(monkeypatch) -> None:
    predicted = []

    def predict(search, placement, algorithm):
        predicted.append(search.problem.demand.has_reuse)
        return prediction.predict(search, placement, algorithm)

    monkeypatch.setattr(plan_search, "predict", predict)
    assert plan.__wrapped__().reuse == plan().reuse
    assert predicted
    assert all(predicted)


def test_reuse_is_in_the_document_only_where_prompts_are_known_to_repeat() -> None:
    document = build_document(plan(), 1)
    assert document["reuse"]["gpusWithout"] > document["selected"]["gpus"]
    assert document["selected"]["predicted"]["cachedShare"] == document["reuse"]["cachedShare"]
    blind = build_document(plan(is_known=False), 1)
    assert blind["reuse"] is None
    assert "cachedShare" not in blind["selected"]["predicted"]


def test_instances_of_the_same_kinds_are_compared_by_their_numbers(answer) -> None:
    selected = answer.selected
    prefill, decode = selected.pools
    text = compare_with_blind(selected, (replace(prefill, replicas=6), decode)).text
    assert text.endswith("without reuse 6 instead of 2 prefill instances would be needed")
    assert "the same instances would be" in compare_with_blind(selected, selected.pools).text
    other = compare_with_blind(selected, (replace(prefill, role=Role.MIXED, replicas=3),))
    assert other.gpus == other.gpus_without == 6
    assert other.text.endswith("without reuse 3M tp2 would be needed instead")
    nothing = compare_with_blind(selected, None)
    assert nothing.gpus_without is None
    assert nothing.text.endswith("without reuse no plan meets the SLO")


FIRST = 4_000


@cache
def converse(turns: float = 8) -> tuple[CandidatePlacement, Trace]:
    """Conversations that two instances have forgotten by the next turn."""
    chat = known_problems.chat(prompt=900, output=60)
    source = replace(chat.source, conversations=Conversations(turns, 2_000, 64))
    demand = Demand(6.0, source, 2048)
    problem = known_problems.problem(
        demand, supplies=(known_problems.nodes(1),), policies=Policies()
    )
    candidate = next(each for each in list_candidates(problem) if each.gpus == 1)
    instance = PlannedInstance(candidate, Batching.VLLM, 64, 2048, problem.policies, problem.slo)
    return CandidatePlacement((InstanceGroup(Role.MIXED, instance, 2),)), demand.draw(12_000)


def test_host_memory_is_priced_by_what_it_finds_in_addition() -> None:
    placement, trace = converse()
    found = re.fullmatch(
        r"(\d+) GiB of host memory for each instance \(engine.kvOffloadingGib\) would find up to "
        r"([0-9.]+) % more \(estimated\)",
        estimate_host_memory(placement, trace, FIRST) or "",
    )
    assert found is not None
    gain = float(found[2])
    repeated = get_repeated_share(measure_reuse(trace)) or 0.0
    assert 2 < gain < 100 * repeated + 5


def test_the_estimate_of_host_memory_is_near_what_a_simulation_finds() -> None:
    placement, trace = converse()
    found = estimate_host_memory(placement, trace, FIRST) or ""
    gib, gain = int(found.split()[0]), float(re.findall(r"([0-9.]+) %", found)[0])
    shares = []
    for size in (None, gib):
        (group,) = placement.groups
        policies = replace(group.instance.policies, kv_offloading_gib=size)
        engine = replace(group.instance, policies=policies).engine
        fleet = SimulatedFleet(mixed=(SimulatedPool(engine, group.replicas),))
        outcome = simulate(fleet, trace)
        cached = (outcome.cached_tokens + outcome.loaded_tokens)[FIRST:].sum()
        shares.append(100 * cached / trace.prompt_tokens[FIRST:].sum())
    assert 0.5 * gain < shares[1] - shares[0] < 1.2 * gain


def test_host_memory_that_finds_little_is_not_mentioned() -> None:
    assert estimate_host_memory(*converse(turns=1.01), FIRST) is None
