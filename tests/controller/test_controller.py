"""What the controller hands to the decisions."""

import json
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from cleave.api.deployment import LLMDeployment
from cleave.api.engine import EngineSpec, EngineType
from cleave.controller.cluster import apply
from cleave.controller.cluster.actions import Action, Apply, PatchStatus, SetFinalizers
from cleave.controller.cluster.apply import FINALIZER
from cleave.controller.cluster.cache import CachedResource, ReadConfigMap, ResourceKey
from cleave.controller.cluster.client import KubeApiError
from cleave.controller.cluster.model_hub import HubAnswer
from cleave.controller.cluster.objects import ObservedPod
from cleave.controller.controller import CONFIG_PERIOD_S, Controller
from cleave.controller.metrics import OperatorMetrics
from cleave.controller.settings import OperatorSettings
from cleave.manifests.credentials import name_accounts
from cleave.manifests.labels import Manifest
from cleave.manifests.owned_objects import build_accounts
from cleave.manifests.topology import NodeTopology
from cleave.perf.model import model_report
from cleave.perf.model.known_models import CONFIGS
from cleave.perf.model.model_report import EngineFacts
from cleave.rpc.fleet_status import FleetInstance

from tests.support.built_pools import build_pools
from tests.support.fake_cluster import chat, node


def list_accounts(manifest: Manifest) -> list[Manifest]:
    """The service accounts that a deployment owns."""
    deployment = LLMDeployment.model_validate(manifest)
    accounts = name_accounts("default", "chat", deployment.metadata.uid or "")
    owned = [apply.with_owner(each, deployment) for each in build_accounts(deployment, accounts)]
    return [each for each in owned if each["kind"] == "ServiceAccount"]


@pytest.mark.parametrize(
    ("engine", "products"),
    [
        (EngineSpec(), ["H100"]),
        (EngineSpec(image="registry/vllm-arm64"), ["GB200", "H100"]),
        (EngineSpec(type=EngineType.EMULATED), ["GB200", "H100"]),
        (None, ["GB200", "H100"]),
    ],
)
def test_plans_with_cleaves_image_leave_out_nodes_that_cannot_run_it(
    engine: EngineSpec | None, products: list[str]
) -> None:
    controller = Controller(OperatorSettings(), OperatorMetrics())
    old = node("old", product="GB200")
    old["metadata"]["labels"]["kubernetes.io/arch"] = "arm64"
    for each in (old, node("new", product="H100")):
        controller.on_change(each)
    found = controller.build_inventory(engine)
    assert found.cluster is not None
    assert [group.gpu for group in found.cluster.nodes] == products
    assert controller.build_inventory(engine) is found
    controller.on_change(node("more", product="B200"))
    assert controller.build_inventory(engine) is not found


@pytest.mark.parametrize("kind", ["LLMDeployment", "InstancePool"])
async def test_a_stored_resource_that_rules_refuse_now_says_so_and_can_be_deleted(
    kind: str,
) -> None:
    """An earlier version admitted the flags of data parallelism."""
    controller = Controller(OperatorSettings(), OperatorMetrics())
    spec = {"model": "m", "engine": {"args": ["--data-parallel-size=2"]}}
    own = {
        "LLMDeployment": {"slo": {"ttftMs": 400, "tpotMs": 40}},
        "InstancePool": {"deployment": "chat", "role": "mixed", "revision": "r1"},
    }
    meta = {"name": "chat", "namespace": "team", "uid": "u", "finalizers": [FINALIZER, "own/f"]}
    stored = {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": kind,
        "metadata": meta,
        "spec": {**spec, **own[kind]},
    }
    key = next(iter(controller.cache.upsert(stored)))

    async def decide() -> list[Action]:
        cached = controller.cache.get(key)
        assert cached is not None
        return await controller._decide(key, cached)

    patch = next(each for each in await decide() if isinstance(each, PatchStatus))
    (ready,) = patch.status["conditions"]
    assert (ready["type"], ready["status"], ready["reason"]) == ("Ready", "False", "Invalid")
    assert "spec.engine.args" in ready["message"]
    assert "parallelism.data" in ready["message"]

    meta["deletionTimestamp"] = "2026-01-02T03:04:05Z"
    controller.cache.upsert(stored)
    (action,) = await decide()
    assert isinstance(action, SetFinalizers)
    assert action.finalizers == ("own/f",), (
        "pods and gateways are collected, and drain by themselves"
    )


def declare_config(name: str, version: int = 1) -> Manifest:
    model = {"source": "org/new", "config": {"configMapKeyRef": {"name": name}}}
    declared = chat(engine={"type": "vLLM"}, model=model)
    meta = {**declared["metadata"], "uid": "u", "resourceVersion": str(version)}
    return {**declared, "metadata": meta}


async def test_a_config_map_is_read_once_a_period_and_when_the_reference_changes() -> None:
    now, text, reads = [1_000.0], json.dumps(CONFIGS["qwen3-8b"]), []

    async def read(namespace: str, name: str) -> ReadConfigMap:
        reads.append((namespace, name))
        return ReadConfigMap(name, {"config.json": text})

    controller = Controller(
        OperatorSettings(), OperatorMetrics(), clock=lambda: now[0], read_config_map=read
    )

    async def refresh() -> CachedResource:
        key = ResourceKey("LLMDeployment", "default", "chat")
        cached = controller.cache.get(key)
        assert cached is not None
        return await controller._refresh_config(key, cached)

    controller.on_change(declare_config("new"))
    for _ in range(2):
        assert (await refresh()).model_fault == ""
    assert reads == [("default", "new")]
    # Deleted or changed since: nothing has reported that.
    text = "{}"
    now[0] += CONFIG_PERIOD_S
    assert (await refresh()).model_fault.startswith("ConfigMap new, key config.json: ")
    controller.on_change(declare_config("other", version=2))
    await refresh()
    assert reads == [("default", "new"), ("default", "new"), ("default", "other")]


async def test_what_was_read_of_a_config_map_holds_while_the_api_server_fails() -> None:
    now, text, fails = [1_000.0], json.dumps(CONFIGS["qwen3-8b"]), [False]

    async def read(namespace: str, name: str) -> ReadConfigMap:
        if fails[0]:
            raise KubeApiError(503, "ServiceUnavailable", "etcd is away")
        return ReadConfigMap(name, {"config.json": text})

    controller = Controller(
        OperatorSettings(), OperatorMetrics(), clock=lambda: now[0], read_config_map=read
    )
    key = ResourceKey("LLMDeployment", "default", "chat")

    async def refresh() -> CachedResource:
        cached = controller.cache.get(key)
        assert cached is not None
        return await controller._refresh_config(key, cached)

    controller.on_change(declare_config("new"))
    await refresh()
    fails[0], now[0] = True, now[0] + CONFIG_PERIOD_S
    assert (await refresh()).model_fault == ""
    controller.on_change(declare_config("other", version=2))
    with pytest.raises(KubeApiError):
        await refresh()


async def test_a_deployment_waits_for_its_config_map_and_is_planned_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, found, submitted = [1_000.0], ReadConfigMap("new", fault="it does not exist"), []

    async def read(namespace: str, name: str) -> ReadConfigMap:
        assert (namespace, name) == ("default", "new")
        return found

    controller = Controller(
        OperatorSettings(), OperatorMetrics(), clock=lambda: now[0], read_config_map=read
    )
    monkeypatch.setattr(controller.planner, "submit", lambda *job: submitted.append(job))
    workload = {"rate": 1, "promptTokens": {"mean": 100}, "outputTokens": {"mean": 10}}
    declared = declare_config("new")
    declared["spec"]["workload"] = workload
    controller.on_change(declared)
    controller.on_change(node("n1", product="H100"))
    key = ResourceKey("LLMDeployment", "default", "chat")

    executor = AsyncMock()
    await controller._reconcile(key, executor)
    (actions,) = executor.carry_out.await_args.args
    (status,) = (each.status for each in actions if isinstance(each, PatchStatus))
    (ready,) = (each for each in status["conditions"] if each["type"] == "PlanReady")
    assert ready["reason"] == "ModelUnknown"
    assert "it does not exist" in ready["message"]
    assert not submitted
    found = ReadConfigMap("new", {"config.json": json.dumps(CONFIGS["qwen3-8b"])})
    now[0] += CONFIG_PERIOD_S
    await controller._reconcile(key, executor)
    ((_, planned, find_machines, _),) = submitted
    assert planned.spec.model.config.inline == CONFIGS["qwen3-8b"]
    assert find_machines().cluster is not None


async def test_an_unknown_model_is_planned_from_what_the_hub_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    submitted: list[Any] = []
    hub = Mock(url="https://hub")
    hub.find.return_value = None
    controller = Controller(OperatorSettings(), OperatorMetrics(), model_hub=hub)
    monkeypatch.setattr(controller.planner, "submit", lambda *job: submitted.append(job))
    declared = declare_config("unused")
    declared["spec"] |= {
        "model": "org/new",
        "workload": {"rate": 1, "promptTokens": {"mean": 100}, "outputTokens": {"mean": 10}},
    }
    controller.on_change(declared)
    for account in list_accounts(declared):
        controller.on_change(account)
    controller.on_change(node("n1", product="H100"))
    key = ResourceKey("LLMDeployment", "default", "chat")
    executor = AsyncMock()

    async def reconcile() -> list[Any]:
        await controller._reconcile(key, executor)
        (actions,) = executor.carry_out.await_args.args
        return actions

    def find_plan_message(actions: list[Any]) -> str:
        (status,) = (each.status for each in actions if isinstance(each, PatchStatus))
        return next(each for each in status["conditions"] if each["type"] == "PlanReady")["message"]

    # While it is read nothing starts; where it cannot be read, the smallest pair does.
    actions = await reconcile()
    assert "is being read from https://hub; instances stay" in find_plan_message(actions)
    assert not [each for each in actions if is_pool(each)]
    hub.find.return_value = HubAnswer(1.0, fault="it answers 401")
    assert [each for each in await reconcile() if is_pool(each)]
    assert not submitted

    hub.find.return_value = HubAnswer(1.0, CONFIGS["qwen3-8b"])
    await reconcile()
    ((_, planned, _, _),) = submitted
    assert planned.spec.model.config.inline == CONFIGS["qwen3-8b"]
    # It outlasts the next event, and nothing is read for a model that the table has.
    controller.on_change(declared)
    cached = controller.cache.get(key)
    assert cached is not None
    assert isinstance(cached.resource, LLMDeployment)
    assert cached.resource.spec.model.config is not None
    declared["spec"]["model"] = "Qwen/Qwen3-8B"
    controller.on_change(declared)
    hub.find.reset_mock()
    await reconcile()
    hub.find.assert_not_called()


def is_pool(action: object) -> bool:
    return isinstance(action, Apply) and action.manifest["kind"] == "InstancePool"


async def test_a_plan_outlasts_a_restart_while_the_hub_is_away() -> None:
    hub = Mock(url="https://hub")
    hub.find.return_value = HubAnswer(1.0, fault="it answers 503")
    controller = Controller(OperatorSettings(), OperatorMetrics(), model_hub=hub)
    declared = declare_config("unused")
    declared["spec"] |= {"model": "org/new", "workload": WORKLOAD}
    declared["status"] = {"plan": {"inputs": "0123"}}
    controller.on_change(declared)
    key = ResourceKey("LLMDeployment", "default", "chat")
    cached = controller.cache.get(key)
    assert cached is not None
    assert not controller._apply_hub(key, cached).model_fault, "no instance has this model"
    resource = LLMDeployment.model_validate(chat(engine={"type": "vLLM"}, model="org/new"))
    pools = build_pools(resource, NodeTopology())
    own = CachedResource(pools[0], {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controller.cache, "list_pools", lambda _: [own])
        fault = controller._apply_hub(key, cached).model_fault
        assert fault == "its config.json is not read from https://hub: it answers 503"


WORKLOAD = {"rate": 1, "promptTokens": {"mean": 100}, "outputTokens": {"mean": 10}}


async def test_an_unknown_model_is_planned_once_a_worker_has_reported_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    submitted: list[Any] = []
    controller = Controller(OperatorSettings(), OperatorMetrics(), clock=lambda: 1_000.0)
    monkeypatch.setattr(controller.planner, "submit", lambda *job: submitted.append(job))
    declared = declare_config("unused")
    declared["spec"] |= {
        "model": "org/new",
        "workload": {"rate": 1, "promptTokens": {"mean": 100}, "outputTokens": {"mean": 10}},
    }
    controller.on_change(declared)
    controller.on_change(node("n1", product="H100"))
    key = ResourceKey("LLMDeployment", "default", "chat")
    resource = LLMDeployment.model_validate(chat(engine={"type": "vLLM"}, model="org/new"))
    pool, _ = build_pools(resource, NodeTopology())
    pod = ObservedPod("p", "u2", pool.spec.role, pool.spec.revision, ready=True)
    monkeypatch.setattr(controller.cache, "list_pods", lambda _: (pod,))
    facts = EngineFacts(CONFIGS["qwen3-8b"], 4096, 16, "bfloat16", "auto", 1, 1, [])
    reported = {"p": FleetInstance("p", model_report=model_report.encode(facts))}
    monkeypatch.setattr(
        controller._gateways, "get_or_refresh", AsyncMock(side_effect=[{}, reported, reported])
    )

    async def reconcile() -> Manifest:
        executor = AsyncMock()
        await controller._reconcile(key, executor)
        (actions,) = executor.carry_out.await_args.args
        (status,) = (each.status for each in actions if isinstance(each, PatchStatus))
        return status

    assert "reportedModel" not in await reconcile()
    status = await reconcile()
    assert status["reportedModel"]["instance"] == "p"
    assert not submitted
    meta = {**declared["metadata"], "resourceVersion": "2"}
    controller.on_change({**declared, "metadata": meta, "status": status})
    await reconcile()
    ((_, planned, find_machines, _),) = submitted
    assert planned.spec.model.config.inline == model_report.select_config(CONFIGS["qwen3-8b"])
    assert find_machines().cluster is not None


async def test_pools_are_frozen_until_their_deployment_is_looked_at_and_while_paused() -> None:
    controller = Controller(OperatorSettings(), OperatorMetrics())
    key = ResourceKey("LLMDeployment", "default", "chat")

    def declare(version: int, **spec: object) -> Manifest:
        declared = chat(**spec)
        meta = {**declared["metadata"], "namespace": "default", "uid": "u"}
        return {**declared, "metadata": {**meta, "resourceVersion": str(version)}}

    assert not controller._is_frozen(key), "a pool by hand has no deployment"
    controller.on_change(declare(1))
    assert controller._is_frozen(key)
    await controller._reconcile(key, AsyncMock())
    assert not controller._is_frozen(key)
    controller.on_change(declare(2, paused=True))
    assert controller._is_frozen(key)
