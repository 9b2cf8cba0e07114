"""A deployment that lends has the instances that are left to it, and says so."""

from cleave.api.deployment import LLMDeployment
from cleave.api.pool import InstancePool
from cleave.controller.cluster.gpu_lending import GpuRoom, PlacedInstance
from cleave.controller.cluster.objects import ObservedNode
from cleave.controller.deployment.lending import is_lending, limit_pools
from cleave.manifests.topology import NodeTopology

from tests.support.built_pools import build_pools
from tests.support.fake_cluster import chat, manual_placement


def build(**replicas: int) -> list[InstancePool]:
    declared = chat(engine={"type": "vLLM"}, placement=manual_placement(**replicas))
    deployment = LLMDeployment.model_validate(declared)
    return build_pools(deployment, NodeTopology())


def room(*free: int, held: int = 0, borrowers: int = 1) -> GpuRoom:
    return GpuRoom(
        tuple(ObservedNode(f"n{n}", True, True, "H100", count) for n, count in enumerate(free)),
        tuple(PlacedInstance("chat-decode", f"d{n}", (("n0", 1),)) for n in range(held)),
        2,
        None,
        tuple(f"default/high-{n} (priority {n})" for n in range(borrowers)),
    )


def test_pools_shrink_in_proportion_to_what_is_left() -> None:
    desired = build(prefill=2, decode=4)
    limited, condition = limit_pools(desired, room(1, held=2), "gpu")
    assert [pool.spec.replicas for pool in limited] == [1, 2]
    assert condition is not None
    assert condition.message == "lends 3 of 6 GPUs to default/high-0 (priority 0)"
    assert is_lending(
        {"conditions": [{"type": condition.type, "status": "True", "reason": condition.reason}]}
    )


def test_many_borrowers_are_counted() -> None:
    _, condition = limit_pools(build(mixed=3), room(0, borrowers=4), "gpu")
    assert condition is not None
    names = "default/high-0 (priority 0), default/high-1 (priority 1) and 2 more"
    assert condition.message == f"lends 1 of 3 GPUs to {names}"


def test_nothing_changes_where_there_is_room_or_nothing_is_lent() -> None:
    desired = build(prefill=2, decode=4)
    assert limit_pools(desired, None, "gpu") == (desired, None)
    assert limit_pools(desired, room(8), "gpu") == (desired, None)
    assert limit_pools(desired, room(0), "cpu") == (desired, None)
    assert not is_lending({})
