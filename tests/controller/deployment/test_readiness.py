"""Ready with observedGeneration N: generation N is rolled out. In a cluster in memory."""

import random
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replace_fields

from cleave.api.deployment import LLMDeployment
from cleave.api.role import Role
from cleave.controller.cluster.actions import Apply
from cleave.controller.cluster.cache import ResourceKey
from cleave.controller.cluster.objects import parse_child
from cleave.controller.deployment.reconcile import reconcile
from cleave.controller.views import DeploymentView
from cleave.manifests.labels import Manifest
from cleave.rpc.fleet_status import MAX_INSTANCES, FleetInstance, KvPath

from tests.controller.deployment.test_reconcile import both, build_pools, deployment, pods, view
from tests.controller.test_convergence import ControlPlane, condition, control_plane, happen
from tests.support.built_pools import hash_revision
from tests.support.fake_cluster import chat, manual_placement

PAIR = {"placement": manual_placement(prefill=1, decode=2)}
TRAFFIC = {"rate": 1, "promptTokens": {"mean": 100}, "outputTokens": {"mean": 10}}


def state(here: ControlPlane, kind: str = "Ready") -> tuple[str, str]:
    """Status and reason of a condition of the generation that there is."""
    found = here.cluster.get("LLMDeployment", "chat")
    said = condition(here.cluster, kind)
    generation = found["metadata"]["generation"]
    assert said["observedGeneration"] == found["status"]["observedGeneration"] == generation
    return said["status"], said["reason"]


def model(here: ControlPlane) -> str:
    return str(here.cluster.get("LLMDeployment", "chat")["status"]["model"])


def look(here: ControlPlane, turns: int = 4) -> None:
    """The operator works; nothing else in the cluster moves."""
    for _ in range(turns):
        here.deliver()
        here.resync()
        here.turn()


def records(here: ControlPlane) -> list[Manifest]:
    """Every version of the deployment from now on."""
    seen: list[Manifest] = []
    here.cluster.watchers.append(
        lambda _, each: seen.append(each) if each["kind"] == "LLMDeployment" else None
    )
    return seen


def is_ready(found: Manifest) -> bool:
    """As `kubectl wait --for=condition=Ready` finds it."""
    return any(
        each["type"] == "Ready"
        and each["status"] == "True"
        and each["observedGeneration"] >= found["metadata"]["generation"]
        for each in found.get("status", {}).get("conditions", ())
    )


def test_a_changed_model_is_ready_when_its_instances_have_replaced_all_others() -> None:
    here = control_plane(**PAIR)
    here.converge()
    assert state(here) == ("True", "Serving")
    here.cluster.edit("LLMDeployment", "chat", model="facebook/opt-66b")
    look(here)
    assert state(here) == ("False", "RollingOut")
    assert state(here, "Available") == ("True", "Serving")
    assert model(here) == "facebook/opt-13b"
    seen = records(here)
    here.converge()
    assert state(here) == ("True", "Serving")
    assert model(here) == "facebook/opt-66b"
    first = next(each for each in seen if is_ready(each))
    assert first["status"]["model"] == "facebook/opt-66b"
    assert [each["updated"] for each in first["status"]["roles"]] == [1, 2]
    assert [each["ready"] for each in first["status"]["roles"]] == [1, 2]


def test_a_changed_template_is_rolled_out_before_it_is_ready() -> None:
    here = control_plane(**PAIR)
    here.converge()
    here.cluster.edit("LLMDeployment", "chat", template={"drainTimeoutS": 30})
    look(here)
    assert state(here)[0] == "False"
    assert state(here, "Available") == ("True", "Serving")
    here.converge()
    assert state(here) == ("True", "Serving")


def test_changed_gateways_are_rolled_out_before_it_is_ready() -> None:
    here = control_plane(**PAIR)
    here.converge()
    here.cluster.edit("LLMDeployment", "chat", routing={"policy": "RoundRobin"})
    look(here)
    assert state(here) == ("False", "RollingOut")
    assert state(here, "Progressing") == ("True", "RollingOut")
    here.cluster.run_gateways()
    look(here)
    assert state(here) == ("True", "Serving")
    assert state(here, "Progressing") == ("False", "Settled")


def test_an_edit_that_changes_nothing_that_runs_never_ends_ready() -> None:
    here = control_plane(**PAIR)
    here.converge()
    seen = records(here)
    here.cluster.edit("LLMDeployment", "chat", rollout={"maxSurge": 3})
    look(here)
    assert state(here) == ("True", "Serving")
    statuses = {each["status"]["conditions"][0]["status"] for each in seen}
    assert statuses == {"True"}


def test_more_instances_by_an_edit_are_awaited_and_those_by_scale_are_not() -> None:
    here = control_plane(**PAIR)
    here.converge()
    here.cluster.edit("LLMDeployment", "chat", placement=manual_placement(prefill=1, decode=3))
    look(here)
    assert state(here) == ("False", "Scaling")
    here.converge()
    assert state(here) == ("True", "Serving")
    here.cluster.edit("InstancePool", "chat-decode", replicas=6, owner="Manual")
    look(here)
    assert state(here) == ("True", "Serving")
    assert condition(here.cluster, "Progressing")["reason"] == "Scaling"


def autoscaled() -> ControlPlane:
    """A deployment whose autoscaler asks for more decode instances than there is room for."""
    here = control_plane(**PAIR)
    here.converge()
    here.cluster.room = 3
    here.cluster.edit("InstancePool", "chat-decode", replicas=6, owner="Autoscaler")
    for _ in range(6):
        here.cluster.settle()
        look(here, 1)
    assert state(here) == ("True", "Serving")
    return here


def test_an_edit_does_not_wait_for_instances_that_an_autoscaler_asks_for() -> None:
    here = autoscaled()
    here.cluster.edit("LLMDeployment", "chat", rollout={"maxSurge": 3})
    look(here)
    assert state(here) == ("True", "Serving")
    here.cluster.edit("LLMDeployment", "chat", model="facebook/opt-66b")
    look(here)
    assert state(here) == ("False", "RollingOut")
    here.cluster.room = 9
    here.converge()
    assert state(here) == ("True", "Serving")


def test_a_status_from_before_generations_were_remembered_stays_ready() -> None:
    here = control_plane(**PAIR)
    here.converge()
    here.cluster.room = 2
    here.cluster.lose(here.cluster.pods()[0])
    look(here)
    found = here.cluster.get("LLMDeployment", "chat")
    before = {name: each for name, each in found["status"].items() if name != "rolledOutGeneration"}
    here.cluster._changed({**found, "status": before}, is_spec=False)
    look(here)
    assert state(here) == ("True", "Serving")
    generation = found["metadata"]["generation"]
    assert here.cluster.get("LLMDeployment", "chat")["status"]["rolledOutGeneration"] == generation


def test_a_first_roll_out_is_ready_when_all_instances_are() -> None:
    here = control_plane(**PAIR)
    here.cluster.room = 2
    for _ in range(6):
        here.cluster.settle()
        look(here, 1)
    assert state(here) == ("False", "Scaling")
    assert state(here, "Available") == ("True", "Serving")
    here.cluster.room = 9
    here.converge()
    assert state(here) == ("True", "Serving")


def test_lost_instances_leave_a_generation_rolled_out() -> None:
    here = control_plane(**PAIR)
    here.converge()
    prefill, decode = (
        [p for p in here.cluster.pods() if p["metadata"]["labels"]["cleave.dev/role"] == role]
        for role in ("prefill", "decode")
    )
    here.cluster.lose(prefill[0])
    look(here)
    assert state(here) == state(here, "Available") == ("False", "PrefillNotReady")
    here.cluster.lose(decode[0])
    look(here)
    here.cluster.room = 2
    here.cluster.settle()
    look(here)
    # One decode instance finds no room.
    assert state(here) == state(here, "Available") == ("True", "Serving")
    assert state(here, "Degraded") == ("True", "TooFew")


def test_a_change_while_paused_is_not_ready_and_a_pause_alone_is() -> None:
    here = control_plane(**PAIR)
    here.converge()
    here.cluster.edit("LLMDeployment", "chat", paused=True)
    look(here)
    assert state(here) == ("True", "Serving")
    here.cluster.edit("LLMDeployment", "chat", model="facebook/opt-66b")
    here.converge()
    assert state(here) == ("False", "Paused")
    assert state(here, "Available") == ("True", "Serving")
    assert model(here) == "facebook/opt-13b"
    here.cluster.edit("LLMDeployment", "chat", paused=False)
    here.converge()
    assert state(here) == ("True", "Serving")


def planned(**spec: Any) -> ControlPlane:
    """A deployment with the plan that the planner has answered."""
    here = control_plane(workload=TRAFFIC, **spec)
    look(here, 2)
    question = here.plan_jobs[-1]
    answers = here.controller.planner._results
    answers[ResourceKey("LLMDeployment", "default", "chat")] = replace(
        question,
        plan={
            "revision": "a",
            "reason": "it is enough",
            "gpus": 2,
            "pools": [{"role": "mixed", "replicas": 2}],
            "inputs": question.inputs_hash,
        },
    )
    here.converge()
    assert state(here) == ("True", "Serving")
    return here


def test_a_spec_that_is_being_planned_is_not_ready() -> None:
    here = planned()
    here.cluster.edit("LLMDeployment", "chat", workload={**TRAFFIC, "rate": 9})
    look(here)
    assert state(here) == ("False", "Planning")
    assert state(here, "Available") == ("True", "Serving")


def test_a_spec_without_a_plan_that_holds_is_not_ready() -> None:
    here = planned()
    here.cluster.edit("LLMDeployment", "chat", workload={**TRAFFIC, "rate": 9})
    look(here)
    answers = here.controller.planner._results
    key = ResourceKey("LLMDeployment", "default", "chat")
    answers[key] = replace(here.plan_jobs[-1], infeasible="no plan meets the targets")
    look(here)
    assert state(here) == ("False", "Infeasible")
    assert state(here, "Available") == ("True", "Serving")


def test_advice_is_never_awaited_and_a_change_that_advice_does_not_apply_is_not_ready() -> None:
    here = planned()
    here.cluster.edit("LLMDeployment", "chat", planning={"mode": "Advisory"})
    look(here)
    assert state(here) == ("True", "Serving")
    here.cluster.edit("LLMDeployment", "chat", model="facebook/opt-66b")
    here.converge()
    assert state(here) == ("False", "NotApplied")
    assert state(here, "Available") == ("True", "Serving")


def serving(**spec: Any) -> DeploymentView:
    """A deployment of which everything is there and ready, and nothing remembered."""
    desired = deployment(**spec)
    applied = [each.manifest for each in reconcile(view(desired)) if isinstance(each, Apply)]
    children = {
        (each["kind"], each["metadata"]["name"]): replace(
            parse_child(each), ready=2, is_updated=True
        )
        for each in applied
        if each["kind"] != "InstancePool"
    }
    pools = build_pools(desired)
    whole = {"observedGeneration": 0, "conditions": [{"type": "Ready", "status": "True"}]}
    status = dict.fromkeys((Role.PREFILL, Role.DECODE), whole)
    return view(desired, pools=pools, pods=pods(pools), children=children, pool_status=status)


def test_it_is_ready_at_the_first_look_at_which_all_is_there() -> None:
    assert both(serving()) == [("True", "Serving")] * 2


def test_a_pool_that_has_not_looked_at_its_spec_yet_is_silent() -> None:
    here = serving()
    prefill, *others = here.pools
    meta = prefill.metadata.model_copy(update={"generation": 5})
    pools = (prefill.model_copy(update={"metadata": meta}), *others)
    assert both(replace(here, pools=pools)) == [("False", "RollingOut"), ("True", "Serving")]


def test_gateways_have_to_send_requests_to_the_instances() -> None:
    here = serving()
    unknown = {pod.name: FleetInstance(pod.name) for pod in here.pods}
    assert both(replace(here, instances=unknown))[0] == ("False", "RollingOut")
    sent = {name: replace_fields(each, selectable=True) for name, each in unknown.items()}
    assert both(replace(here, instances=sent))[0] == ("True", "Serving")


def test_a_gateway_that_answers_without_an_instance_sends_it_no_requests() -> None:
    here = serving()
    assert both(replace(here, instances=None))[0] == ("True", "Serving")
    assert both(replace(here, instances={}))[0] == ("False", "RollingOut")
    decode = {
        pod.name: FleetInstance(pod.name, selectable=True)
        for pod in here.pods
        if pod.role is Role.DECODE
    }
    assert both(replace(here, instances=decode))[0] == ("False", "RollingOut")
    # A page that is full says nothing of those that it leaves out.
    full = {f"other-{number}": FleetInstance(f"other-{number}") for number in range(MAX_INSTANCES)}
    assert both(replace(here, instances={**full, **decode}))[0] == ("True", "Serving")


def test_where_requests_have_to_be_split_the_kv_path_has_to_be_verified() -> None:
    here = serving(routing={"fallback": "Never"})
    sent = {pod.name: FleetInstance(pod.name, selectable=True) for pod in here.pods}
    assert both(replace(here, instances=sent))[0] == ("False", "RollingOut")
    path = KvPath(verified=True)
    tested = {name: replace_fields(each, kv_path=path) for name, each in sent.items()}
    assert both(replace(here, instances=tested))[0] == ("True", "Serving")


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_no_generation_is_ready_before_instances_of_its_revision_were(seed: int) -> None:
    rng = random.Random(seed)
    here = control_plane(
        placement=manual_placement(prefill=rng.randint(1, 3), decode=rng.randint(1, 3))
    )
    cluster = here.cluster
    revisions: dict[int, str] = {}
    served: dict[str, set[str]] = {}

    def watch(_: str, each: Manifest) -> None:
        meta = each["metadata"]
        if each["kind"] == "Pod" and "podIP" in each.get("status", {}):
            labels = meta["labels"]
            served.setdefault(labels["cleave.dev/revision"], set()).add(labels["cleave.dev/role"])
        elif each["kind"] == "LLMDeployment":
            of = hash_revision(LLMDeployment.model_validate({**chat(), "spec": each["spec"]}))
            revisions[meta["generation"]] = of
            if is_ready(each):
                generation = each["status"]["observedGeneration"]
                assert served.get(revisions[generation]) == {"prefill", "decode"}, f"seed {seed}"

    cluster.watchers.append(watch)
    cluster.edit("LLMDeployment", "chat", paused=False)
    for _ in range(rng.randint(5, 60)):
        happen(here, rng)
    cluster.room = 1_000
    here.converge(turns=150)
    assert state(here) == ("True", "Serving"), f"seed {seed}"
