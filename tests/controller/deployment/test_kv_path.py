"""What the KV self-tests say about a deployment."""

from typing import Any

import pytest

from cleave.api.deployment import LLMDeployment
from cleave.api.role import Role
from cleave.controller.cluster.inventory import build_inventory
from cleave.controller.cluster.objects import ObservedPod
from cleave.controller.deployment.kv_path import build_conditions
from cleave.controller.views import DeploymentView
from cleave.manifests.pool import build_pools
from cleave.manifests.topology import NodeTopology
from cleave.planner.placement import choose_placement
from cleave.rpc.fleet_status import FleetInstance, KvPath

from tests.support.fake_cluster import chat, manual_placement

RATE = {"predicted": {"kvLink": {"kind": "InfiniBand", "gbPerS": 18.0}}}


def conditions(
    plan: dict[str, Any] | None = None,
    placement: dict[str, Any] | None = None,
    machines: NodeTopology = NodeTopology(),  # noqa: B008 - a frozen value
    pull_ms: float = 250.0,
    **gb_per_s: float | None,
) -> list[Any]:
    manual = placement or manual_placement(prefill=1, decode=2)
    resource = LLMDeployment.model_validate(chat(placement=manual))
    pods = [ObservedPod(name, name, Role.DECODE, "r", ready=True) for name in gb_per_s]
    known = {
        name: FleetInstance(
            name,
            kv_path=KvPath(rate is not None, "nixl", 1.0, (rate or 0) * 1e9, "p -> d", pull_ms),
        )
        for name, rate in gb_per_s.items()
    }
    view = DeploymentView(
        resource, build_inventory([]), 0.0, pods=tuple(pods), instances=known or None
    )
    pools = build_pools(resource, choose_placement(resource), machines)
    desired = {each.spec.role: each for each in pools}
    return list(build_conditions(view, desired, plan))


@pytest.mark.parametrize(
    ("plan", "rates", "status", "reason"),
    [
        (RATE, {"a": 17.0, "b": 4.6}, True, "AsPlanned"),
        (RATE, {"a": 17.0, "b": 4.4}, False, "BelowPlan"),
        # As in a self-test that has not passed: there is no rate to compare.
        (RATE, {"a": None}, None, "NotMeasured"),
        # Engines that count bytes but no duration.
        (RATE, {"a": 0.0}, None, "NotMeasured"),
        (RATE, {}, None, "NotReported"),
        ({"predicted": {"goodput": 3.0}}, {"a": 1.0}, None, "NotPlanned"),
        (None, {"a": 1.0}, None, "NotPlanned"),
    ],
)
def test_the_slowest_path_is_compared_with_the_plan(
    plan: dict[str, Any] | None, rates: dict[str, float | None], status: bool | None, reason: str
) -> None:
    _, rate = conditions(plan, **rates)
    assert (rate.type, rate.status, rate.reason) == ("KVRateAsPlanned", status, reason)


def test_a_slow_path_names_its_instance_both_rates_and_a_remedy() -> None:
    verified, rate = conditions(RATE, fast=17.0, slow=1.25)
    assert verified.status
    assert "slow measured 1.25 GB/s per GPU (nixl)" in rate.message
    assert "the plan assumes 18 GB/s (InfiniBand)" in rate.message
    assert "planning.network" in rate.message
    within = {"predicted": {"kvLink": {"kind": "NVLink", "gbPerS": 360.0}}}
    _, rate = conditions(within, slow=1.25)
    assert "CUDA IPC" in rate.message
    assert "planning.affinity High" in rate.message


def test_a_test_as_short_as_its_fixed_costs_says_nothing_about_the_rate() -> None:
    # 335 MB, which NVLink moves within its latency, and the same through host memory.
    within = {"predicted": {"kvLink": {"kind": "NVLink", "gbPerS": 360.0}}}
    _, rate = conditions(within, pull_ms=4.2, a=80.0)
    assert (rate.status, rate.reason) == (None, "NotMeasured")
    assert "the test took 4.2 ms: too short for a rate" in rate.message
    _, rate = conditions(within, pull_ms=67.0, a=5.0)
    assert (rate.status, rate.reason) == (False, "BelowPlan")
    _, rate = conditions(within, pull_ms=1.0, a=335.0)
    assert (rate.status, rate.reason) == (True, "AsPlanned")


def test_only_pools_without_a_prefill_instance_transfer_no_kv() -> None:
    mixed = {"manual": [{"role": "mixed"}]}
    assert [each.reason for each in conditions(RATE, mixed, a=1.0)] == ["NotNeeded", "NotNeeded"]
    cells = {"manual": [{"role": role, "perCell": 1} for role in ("prefill", "decode")]}
    verified, rate = conditions(RATE, cells, NodeTopology({"H100": 8}), cell=1.0)
    assert (verified.reason, rate.reason) == ("Verified", "BelowPlan")
