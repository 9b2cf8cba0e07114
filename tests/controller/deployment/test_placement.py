"""Which placement is in force: by hand, planned, advised, kept."""

from dataclasses import replace
from typing import Any

from cleave.api.deployment import LLMDeployment
from cleave.api.manifest import validate
from cleave.api.role import Role
from cleave.controller.cluster.actions import PlanJob
from cleave.controller.cluster.inventory import Inventory, build_inventory
from cleave.controller.cluster.objects import ObservedNode
from cleave.controller.deployment.placement import PlacementDecision, decide
from cleave.controller.replan.inputs import PlanInputs
from cleave.manifests.labels import Manifest

from tests.support.fake_cluster import by_hand, chat

WORKLOAD = {"rate": 1, "promptTokens": {"mean": 100}, "outputTokens": {"mean": 10}}
THERE = build_inventory([ObservedNode("n1", True, True, gpu="H100", num_gpus=8)])
MORE = build_inventory([ObservedNode(f"n{i}", True, True, gpu="H100", num_gpus=8) for i in (1, 2)])
OTHER = build_inventory([ObservedNode("n1", True, True, gpu="A100", num_gpus=8)])


def deployment(**spec: Any) -> LLMDeployment:
    return validate(chat(**{"engine": {"type": "vLLM"}, **spec}))


def plan(inputs_digest: str, replicas: int = 3) -> Manifest:
    pools = [{"role": "mixed", "replicas": replicas}]
    base = {"revision": "a", "reason": "it is enough", "gpus": replicas}
    return {**base, "pools": pools, "inputs": inputs_digest}


def ask(
    asked: LLMDeployment,
    status: Manifest | None = None,
    there: Inventory = THERE,
    outcome: PlanJob | None = None,
    is_limited: bool = False,
) -> PlacementDecision:
    return decide(PlanInputs(asked, there), status or {}, outcome, is_limited=is_limited)


def told(decision: PlacementDecision) -> tuple[bool | None, str]:
    return decision.conditions[0].status, decision.conditions[0].reason


def test_what_is_stated_by_hand_is_in_force() -> None:
    decision = ask(deployment(placement=by_hand(prefill=2, decode=1), workload=WORKLOAD))
    assert decision.placement is not None
    assert decision.placement.count_replicas(Role.PREFILL) == 2
    assert told(decision) == (True, "Manual")
    assert decision.plan_request is None


def test_without_traffic_the_smallest_pair_comes_up_and_no_plan_is_claimed() -> None:
    decision = ask(deployment())
    assert decision.placement is not None
    assert [pool.replicas for pool in decision.placement.pools] == [1, 1]
    assert told(decision) == (False, "NotPlanned")
    assert "spec.workload" in decision.conditions[0].message


def test_a_model_that_the_planner_does_not_know_gets_the_smallest_pair_and_the_reason() -> None:
    for model in ("openai/gpt-oss-120b", "Qwen/Qwen3-32B-FP8", "/models/mine"):
        decision = ask(deployment(model=model, workload=WORKLOAD), {"plan": plan("before")})
        assert decision.placement is not None
        assert [(pool.role, pool.replicas) for pool in decision.placement.pools] == [
            (Role.PREFILL, 1),
            (Role.DECODE, 1),
        ]
        assert decision.plan_request is None
        assert told(decision) == (False, "ModelUnknown")
        message = decision.conditions[0].message
        for part in (model, "one GPU each", "is not known", "config.json", "spec.placement.manual"):
            assert part in message
    emulated = {"type": "Emulated"}
    known = ask(deployment(model="openai/gpt-oss-120b", workload=WORKLOAD, engine=emulated))
    assert known.plan_request is not None


def test_of_an_unknown_model_nothing_is_advised_and_what_runs_stays() -> None:
    advisory = {"workload": WORKLOAD, "planning": {"mode": "Advisory"}, "model": "org/new"}
    alone = ask(deployment(**advisory), {"plan": plan("before")})
    assert (alone.placement, alone.plan_request) == (None, None)
    assert told(alone) == (False, "ModelUnknown")
    stated = ask(deployment(**advisory, placement=by_hand(prefill=2, decode=1)))
    assert stated.placement is not None
    assert stated.placement.count_replicas(Role.PREFILL) == 2
    assert told(stated) == (True, "Manual")


def test_a_pair_that_vllm_cannot_pair_is_not_brought_up() -> None:
    pools = [
        {"role": "prefill", "parallelism": {"tensor": 8}},
        {"role": "decode", "parallelism": {"tensor": 4}},
    ]
    asked = deployment(model="Qwen/Qwen3-30B-A3B", placement={"manual": pools})
    decision = ask(asked, {"plan": plan("before")})
    assert (decision.placement, decision.plan) == (None, plan("before"))
    assert told(decision) == (False, "Faulty")
    assert "spec.engine.connector Cleave" in decision.conditions[0].message


def test_advice_hides_no_fault_of_what_is_stated() -> None:
    # vLLM's connector pairs no such sizes, whatever the model.
    pools = [
        {"role": "prefill", "parallelism": {"tensor": 2}},
        {"role": "decode", "parallelism": {"tensor": 3}},
    ]
    advisory = {"workload": WORKLOAD, "planning": {"mode": "Advisory"}}
    for model in ("Qwen/Qwen3-30B-A3B", "org/new"):
        decision = ask(deployment(model=model, placement={"manual": pools}, **advisory))
        assert (decision.placement, decision.plan_request) == (None, None)
        assert told(decision) == (False, "Faulty")


def test_the_planner_is_asked_once_and_what_runs_stays_meanwhile() -> None:
    asked = deployment(workload=WORKLOAD)
    running = {"plan": plan("another")}
    decision = ask(asked, running)
    assert decision.placement is None
    assert decision.plan == running["plan"]
    assert decision.plan_request == PlanJob(
        PlanInputs(asked, THERE).hash_with(None), THERE.node_counts_hash
    )
    assert told(decision) == (False, "Planning")


def test_an_answer_is_in_force_and_stays_so_from_status_alone() -> None:
    asked = deployment(workload=WORKLOAD)
    question = ask(asked).plan_request
    assert question is not None
    answered = ask(asked, outcome=replace(question, plan=plan(question.inputs_hash)))
    assert answered.placement is not None
    assert answered.placement.count_replicas(Role.MIXED) == 3
    assert told(answered) == (True, "Planned")
    kept = ask(asked, {"plan": answered.plan})
    assert kept.placement == answered.placement
    assert kept.plan_request is None


def test_an_answer_to_another_question_does_not_count() -> None:
    asked = deployment(workload=WORKLOAD)
    decision = ask(asked, outcome=replace(PlanJob("other"), plan=plan("other")))
    assert decision.placement is None
    assert decision.plan_request is not None


def test_more_nodes_are_no_reason_to_plan_anew_and_other_gpus_are() -> None:
    asked = deployment(workload=WORKLOAD)
    status = {"plan": plan(PlanInputs(asked, THERE).hash_with(None))}
    assert ask(asked, status, MORE).plan_request is None
    assert ask(asked, status, OTHER).plan_request is not None


def test_more_nodes_are_a_reason_where_no_plan_was_found_or_pods_find_no_room() -> None:
    asked = deployment(workload=WORKLOAD)
    question = ask(asked).plan_request
    assert question is not None
    nothing = replace(question, infeasible="needs 40 GPUs, has 8")
    refused = ask(asked, outcome=nothing)
    assert told(refused) == (False, "Infeasible")
    assert refused.conditions[1].status is False
    assert "spec.placement.manual" in refused.conditions[0].message
    assert refused.plan_request is None
    assert ask(asked, there=MORE, outcome=nothing).plan_request is not None
    planned = replace(question, plan=plan(question.inputs_hash))
    assert ask(asked, there=MORE, outcome=planned, is_limited=False).plan_request is None
    assert ask(asked, there=MORE, outcome=planned, is_limited=True).plan_request is not None
    assert ask(asked, there=THERE, outcome=planned, is_limited=True).plan_request is None


def test_an_infeasible_edit_keeps_what_runs() -> None:
    asked = deployment(workload=WORKLOAD)
    question = ask(asked).plan_request
    assert question is not None
    running = {"plan": plan("before")}
    refused = ask(asked, running, outcome=replace(question, infeasible="no"))
    assert refused.placement is None
    assert refused.plan == running["plan"]


def test_faults_are_told_and_not_asked_again() -> None:
    asked = deployment(workload=WORKLOAD)
    question = ask(asked).plan_request
    assert question is not None
    faulty = ask(asked, outcome=replace(question, faults=("spec.model.source: unknown",)))
    assert told(faulty) == (False, "Faulty")
    assert faulty.conditions[0].message == "spec.model.source: unknown"
    assert faulty.plan_request is None


def test_advice_is_told_and_changes_nothing() -> None:
    asked = deployment(
        workload=WORKLOAD,
        planning={"mode": "Advisory"},
        placement=by_hand(prefill=1, decode=1),
    )
    first = ask(asked)
    assert first.placement is not None
    assert first.plan_request is not None
    advised = ask(
        asked, outcome=replace(first.plan_request, plan=plan(first.plan_request.inputs_hash))
    )
    assert advised.placement == first.placement
    assert advised.advice == plan(first.plan_request.inputs_hash)
    assert told(advised) == (True, "Advised")
    again = ask(asked, {"advice": advised.advice})
    assert again.plan_request is None
    assert again.advice == advised.advice


def test_advice_alone_brings_nothing_up() -> None:
    asked = deployment(workload=WORKLOAD, planning={"mode": "Advisory"})
    question = ask(asked).plan_request
    assert question is not None
    decision = ask(asked, outcome=replace(question, plan=plan(question.inputs_hash)))
    assert decision.placement is None
    assert decision.advice is not None


def test_the_engines_environment_and_image_change_no_plan() -> None:
    plain = deployment(workload=WORKLOAD)
    engine = {"type": "vLLM", "image": "mine", "env": [{"name": "A", "value": "1"}]}
    args = {"type": "vLLM", "args": ["--max-num-seqs", "4"]}

    def hash_of(spec: LLMDeployment, inventory: Inventory = THERE) -> str:
        return PlanInputs(spec, inventory).hash_with(None)

    assert hash_of(plain) == hash_of(deployment(workload=WORKLOAD, engine=engine))
    assert hash_of(plain) != hash_of(deployment(workload=WORKLOAD, engine=args))
    assert hash_of(plain) == hash_of(plain, replace(THERE, node_counts_hash="other"))
