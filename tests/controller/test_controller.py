"""What the controller hands to the decisions."""

import pytest

from cleave.api.engine import EngineSpec, EngineType
from cleave.controller.cluster.actions import Action, PatchStatus, SetFinalizers
from cleave.controller.cluster.apply import FINALIZER
from cleave.controller.controller import Controller
from cleave.controller.metrics import OperatorMetrics
from cleave.controller.settings import OperatorSettings

from tests.support.fake_cluster import node


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
    assert "use replicas" in ready["message"]

    meta["deletionTimestamp"] = "2026-01-02T03:04:05Z"
    controller.cache.upsert(stored)
    (action,) = await decide()
    assert isinstance(action, SetFinalizers)
    assert action.finalizers == ("own/f",), (
        "pods and gateways are collected, and drain by themselves"
    )
