"""What the controller hands to the decisions."""

import pytest

from cleave.api.engine import EngineSpec, EngineType
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
