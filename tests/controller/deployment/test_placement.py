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
from cleave.perf.model.known_models import CONFIGS
from cleave.planner.resolved_deployment import resolve_in_cluster

from tests.support.fake_cluster import chat, manual_placement

WORKLOAD = {"rate": 1, "promptTokens": {"mean": 100}, "outputTokens": {"mean": 10}}
INVENTORY = build_inventory([ObservedNode("n1", True, True, gpu="H100", num_gpus=8)])
MORE = build_inventory([ObservedNode(f"n{i}", True, True, gpu="H100", num_gpus=8) for i in (1, 2)])
OTHER = build_inventory([ObservedNode("n1", True, True, gpu="A100", num_gpus=8)])


def deployment(**spec: Any) -> LLMDeployment:
    return validate(chat(**{"engine": {"type": "vLLM"}, **spec}))


def plan(inputs_digest: str, replicas: int = 3) -> Manifest:
    pools = [{"role": "mixed", "replicas": replicas}]
    base = {"revision": "a", "reason": "it is enough", "gpus": replicas}
    return {**base, "pools": pools, "inputs": inputs_digest}


def ask(
    desired: LLMDeployment,
    status: Manifest | None = None,
    inventory: Inventory = INVENTORY,
    outcome: PlanJob | None = None,
    is_limited: bool = False,
) -> PlacementDecision:
    return decide(
        PlanInputs(resolve_in_cluster(desired), inventory),
        status or {},
        outcome,
        is_limited=is_limited,
    )


def read_condition(decision: PlacementDecision) -> tuple[bool | None, str]:
    return decision.conditions[0].status, decision.conditions[0].reason


def test_a_manual_placement_is_applied() -> None:
    decision = ask(deployment(placement=manual_placement(prefill=2, decode=1), workload=WORKLOAD))
    assert decision.placement is not None
    assert decision.placement.count_replicas(Role.PREFILL) == 2
    assert read_condition(decision) == (True, "Manual")
    assert decision.conditions[1].message == "the placement is manual: nothing was predicted"
    assert decision.plan_request is None


def test_instances_above_the_most_nodes_are_named_and_the_pools_stay() -> None:
    small = build_inventory([ObservedNode("n1", True, True, gpu="H100", num_gpus=1)])
    pools = [{"role": "prefill"}, {"role": "decode", "parallelism": {"tensor": 8, "pipeline": 10}}]
    desired = deployment(model="example/unknown-9b", placement={"manual": pools})
    decision = ask(desired, {"plan": plan("before")}, inventory=small)
    assert decision.placement is None
    assert decision.plan == plan("before")
    assert read_condition(decision) == (False, "Faulty")
    assert decision.conditions[0].message == (
        "spec.placement.manual[1].parallelism: an instance of 80 GPUs (tensor 8, pipeline 10) "
        "would span 80 nodes, and may span 64; the largest node has 1 GPUs: set smaller sizes, or "
        "use nodes with more GPUs"
    )
    assert ask(desired).placement is not None, "over 10 nodes of 8 GPUs"


def test_a_placement_that_was_not_planned_has_the_link_of_the_nodes() -> None:
    for desired in (deployment(placement=manual_placement(prefill=2, decode=1)), deployment()):
        plan = ask(desired).plan
        assert plan is not None
        assert plan["kvLink"] == {"kind": "Ethernet", "gbPerS": 1.125}
    mixed = ask(deployment(placement={"manual": [{"role": "mixed"}]})).plan
    assert mixed is not None
    assert "kvLink" not in mixed
    unknown = build_inventory([ObservedNode("n1", True, True, gpu="H999", num_gpus=8)])
    plan = ask(deployment(), inventory=unknown).plan
    assert plan is not None
    assert "kvLink" not in plan


def test_without_traffic_the_smallest_pair_comes_up_and_no_plan_is_claimed() -> None:
    decision = ask(deployment())
    assert decision.placement is not None
    assert [pool.replicas for pool in decision.placement.pools] == [1, 1]
    assert read_condition(decision) == (False, "NotPlanned")
    assert "spec.workload" in decision.conditions[0].message
    feasible = decision.conditions[1]
    assert feasible.status is None
    assert feasible.message == "there is no plan that could be compared with the targets"


def test_a_model_that_the_planner_does_not_know_gets_the_smallest_pair_and_the_reason() -> None:
    for model in ("example/unknown-9b", "example/unknown-9b-FP8", "/models/mine"):
        decision = ask(deployment(model=model, workload=WORKLOAD), {"plan": plan("before")})
        assert decision.placement is not None
        assert [(pool.role, pool.replicas) for pool in decision.placement.pools] == [
            (Role.PREFILL, 1),
            (Role.DECODE, 1),
        ]
        assert decision.plan_request is None
        assert read_condition(decision) == (False, "ModelUnknown")
        message = decision.conditions[0].message
        for part in (model, "one GPU each", "is not known", "config.json", "spec.placement.manual"):
            assert part in message
    emulated = {"type": "Emulated"}
    known = ask(deployment(model="example/unknown-9b", workload=WORKLOAD, engine=emulated))
    assert known.plan_request is not None


def test_of_an_unknown_model_nothing_is_advised_and_what_runs_stays() -> None:
    advisory = {"workload": WORKLOAD, "planning": {"mode": "Advisory"}, "model": "org/new"}
    alone = ask(deployment(**advisory), {"plan": plan("before")})
    assert (alone.placement, alone.plan_request) == (None, None)
    assert read_condition(alone) == (False, "ModelUnknown")
    manual_result = ask(deployment(**advisory, placement=manual_placement(prefill=2, decode=1)))
    assert manual_result.placement is not None
    assert manual_result.placement.count_replicas(Role.PREFILL) == 2
    assert read_condition(manual_result) == (True, "Manual")


def test_a_pair_that_vllm_cannot_pair_is_not_brought_up() -> None:
    pools = [
        {"role": "prefill", "parallelism": {"tensor": 8}},
        {"role": "decode", "parallelism": {"tensor": 4}},
    ]
    desired = deployment(
        model="Qwen/Qwen3-30B-A3B", placement={"manual": pools}, engine={"connector": "Nixl"}
    )
    decision = ask(desired, {"plan": plan("before")})
    assert (decision.placement, decision.plan) == (None, plan("before"))
    assert read_condition(decision) == (False, "Faulty")
    assert "spec.engine.connector Cleave" in decision.conditions[0].message


def test_advice_hides_no_fault_of_a_manual_placement() -> None:
    # vLLM's connector pairs no such sizes for any model.
    pools = [
        {"role": "prefill", "parallelism": {"tensor": 2}},
        {"role": "decode", "parallelism": {"tensor": 3}},
    ]
    advisory = {"workload": WORKLOAD, "planning": {"mode": "Advisory"}}
    advisory |= {"engine": {"connector": "Nixl"}}
    for model in ("Qwen/Qwen3-30B-A3B", "org/new"):
        decision = ask(deployment(model=model, placement={"manual": pools}, **advisory))
        assert (decision.placement, decision.plan_request) == (None, None)
        assert read_condition(decision) == (False, "Faulty")


def test_the_planner_is_called_once_and_running_pools_stay() -> None:
    desired = deployment(workload=WORKLOAD)
    running = {"plan": plan("another")}
    decision = ask(desired, running)
    assert decision.placement is None
    assert decision.plan == running["plan"]
    assert decision.plan_request == PlanJob(
        PlanInputs(resolve_in_cluster(desired), INVENTORY).hash_with(None),
        INVENTORY.node_counts_hash,
    )
    assert read_condition(decision) == (False, "Planning")


def test_an_answer_is_in_force_and_stays_so_from_status_alone() -> None:
    desired = deployment(workload=WORKLOAD)
    question = ask(desired).plan_request
    assert question is not None
    answered = ask(desired, outcome=replace(question, plan=plan(question.inputs_hash)))
    assert answered.placement is not None
    assert answered.placement.count_replicas(Role.MIXED) == 3
    assert read_condition(answered) == (True, "Planned")
    unchanged = ask(desired, {"plan": answered.plan})
    assert unchanged.placement == answered.placement
    assert unchanged.plan_request is None


def test_a_plan_for_other_nodes_is_requested_with_the_limit_in_use() -> None:
    desired = deployment(workload=WORKLOAD)
    question = ask(desired).plan_request
    assert question is not None
    assert not question.is_replan
    chosen = {**plan(question.inputs_hash), "maxModelLen": 4096}
    old = replace(question, plan=chosen, node_counts_hash="other nodes")
    again = ask(desired, {"plan": chosen}, outcome=old, is_limited=True).plan_request
    assert again is not None
    assert (again.is_replan, again.max_model_len) == (True, 4096)
    edited = deployment(workload={**WORKLOAD, "rate": 2})
    fresh = ask(edited, {"plan": chosen}).plan_request
    assert fresh is not None
    assert (fresh.is_replan, fresh.max_model_len) == (False, None)


def test_an_answer_to_another_question_does_not_count() -> None:
    desired = deployment(workload=WORKLOAD)
    decision = ask(desired, outcome=replace(PlanJob("other"), plan=plan("other")))
    assert decision.placement is None
    assert decision.plan_request is not None


def test_more_nodes_are_no_reason_to_plan_anew_and_other_gpus_are() -> None:
    desired = deployment(workload=WORKLOAD)
    status = {"plan": plan(PlanInputs(resolve_in_cluster(desired), INVENTORY).hash_with(None))}
    assert ask(desired, status, MORE).plan_request is None
    assert ask(desired, status, OTHER).plan_request is not None


def test_more_nodes_are_a_reason_where_no_plan_was_found_or_pods_find_no_room() -> None:
    desired = deployment(workload=WORKLOAD)
    question = ask(desired).plan_request
    assert question is not None
    nothing = replace(question, infeasible="needs 40 GPUs, has 8")
    refused = ask(desired, outcome=nothing)
    assert read_condition(refused) == (False, "Infeasible")
    assert refused.conditions[1].status is False
    assert "spec.placement.manual" in refused.conditions[0].message
    assert refused.plan_request is None
    assert ask(desired, inventory=MORE, outcome=nothing).plan_request is not None
    planned = replace(question, plan=plan(question.inputs_hash))
    assert ask(desired, inventory=MORE, outcome=planned, is_limited=False).plan_request is None
    assert ask(desired, inventory=MORE, outcome=planned, is_limited=True).plan_request is not None
    assert ask(desired, inventory=INVENTORY, outcome=planned, is_limited=True).plan_request is None


def test_an_infeasible_edit_keeps_what_runs() -> None:
    desired = deployment(workload=WORKLOAD)
    question = ask(desired).plan_request
    assert question is not None
    running = {"plan": plan("before")}
    refused = ask(desired, running, outcome=replace(question, infeasible="no"))
    assert refused.placement is None
    assert refused.plan == running["plan"]


def test_faults_are_reported_and_not_planned_again() -> None:
    desired = deployment(workload=WORKLOAD)
    question = ask(desired).plan_request
    assert question is not None
    faulty = ask(desired, outcome=replace(question, faults=("spec.model.source: unknown",)))
    assert read_condition(faulty) == (False, "Faulty")
    assert faulty.conditions[0].message == "spec.model.source: unknown"
    assert faulty.plan_request is None


def test_advice_is_reported_and_changes_nothing() -> None:
    desired = deployment(
        workload=WORKLOAD,
        planning={"mode": "Advisory"},
        placement=manual_placement(prefill=1, decode=1),
    )
    first = ask(desired)
    assert first.placement is not None
    assert first.plan_request is not None
    advised = ask(
        desired, outcome=replace(first.plan_request, plan=plan(first.plan_request.inputs_hash))
    )
    assert advised.placement == first.placement
    assert advised.advice == plan(first.plan_request.inputs_hash)
    assert read_condition(advised) == (True, "Advised")
    again = ask(desired, {"advice": advised.advice})
    assert again.plan_request is None
    assert again.advice == advised.advice


def test_advice_alone_brings_nothing_up() -> None:
    desired = deployment(workload=WORKLOAD, planning={"mode": "Advisory"})
    question = ask(desired).plan_request
    assert question is not None
    decision = ask(desired, outcome=replace(question, plan=plan(question.inputs_hash)))
    assert decision.placement is None
    assert decision.advice is not None


def test_the_engines_environment_and_image_change_no_plan() -> None:
    plain = deployment(workload=WORKLOAD)
    engine = {"type": "vLLM", "image": "mine", "env": [{"name": "A", "value": "1"}]}
    args = {"type": "vLLM", "args": ["--max-num-seqs", "4"]}

    def hash_of(spec: LLMDeployment, inventory: Inventory = INVENTORY) -> str:
        return PlanInputs(resolve_in_cluster(spec), inventory).hash_with(None)

    assert hash_of(plain) == hash_of(deployment(workload=WORKLOAD, engine=engine))
    assert hash_of(plain) != hash_of(deployment(workload=WORKLOAD, engine=args))
    assert hash_of(plain) == hash_of(plain, replace(INVENTORY, node_counts_hash="other"))


def test_another_dispatch_policy_is_another_plan_and_other_routing_is_not() -> None:
    def hash_of(**routing: str) -> str:
        inputs = PlanInputs(
            resolve_in_cluster(deployment(workload=WORKLOAD, routing=routing)), INVENTORY
        )
        return inputs.hash_with(None)

    assert hash_of(policy="PrefixAware") == hash_of() == hash_of(late="Refuse")
    assert hash_of(policy="Random") != hash_of()


def test_without_its_config_map_everything_stays_as_it_is() -> None:
    config = {"configMapKeyRef": {"name": "new"}}
    model, fault = {"source": "org/new", "config": config}, "ConfigMap new does not exist"
    for spec in ({"workload": WORKLOAD}, {"placement": manual_placement(prefill=2, decode=1)}, {}):
        inputs = PlanInputs(resolve_in_cluster(deployment(model=model, **spec)), INVENTORY, fault)
        decision = decide(inputs, {"plan": plan("before")}, None, is_limited=False)
        assert (decision.placement, decision.plan_request) == (None, None)
        assert decision.plan == plan("before")
        assert read_condition(decision) == (False, "ModelUnknown")
        assert decision.conditions[0].message.startswith(
            "spec.model.config.configMapKeyRef: ConfigMap new does not exist"
        )


def test_a_folder_with_a_config_is_planned() -> None:
    config = {"inline": dict(CONFIGS["qwen3-8b"])}
    model = {"source": "/models/new", "config": config}
    decision = ask(deployment(model=model, workload=WORKLOAD))
    assert decision.plan_request is not None
    other = {"source": "/models/new", "config": {"inline": {**config["inline"], "x": 1}}}
    changed = ask(deployment(model=other, workload=WORKLOAD)).plan_request
    assert changed is not None
    assert changed.inputs_hash != decision.plan_request.inputs_hash
