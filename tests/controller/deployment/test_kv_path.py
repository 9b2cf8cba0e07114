"""What the KV self-tests say about a deployment."""

from typing import Any

import pytest

from cleave.api.cluster import Cluster
from cleave.api.deployment import LLMDeployment
from cleave.api.role import Role
from cleave.controller.cluster.inventory import build_inventory
from cleave.controller.cluster.objects import ObservedPod
from cleave.controller.deployment.kv_path import build_conditions, with_measured_cells
from cleave.controller.views import DeploymentView
from cleave.manifests.topology import NodeTopology
from cleave.planner.resolved_deployment import resolve_in_cluster
from cleave.rpc.fleet_status import FleetInstance, KvPairs, KvPath

from tests.support.built_pools import build_pools
from tests.support.fake_cluster import chat, manual_placement

RATE = {"predicted": {"kvLink": {"kind": "InfiniBand", "gbPerS": 18.0}}}


def conditions(
    plan: dict[str, Any] | None = None,
    placement: dict[str, Any] | None = None,
    machines: NodeTopology = NodeTopology(),  # noqa: B008 - a frozen value
    pull_ms: float = 250.0,
    pairs: dict[str, KvPairs] | None = None,
    witness: dict[str, float] | None = None,
    **gb_per_s: float | None,
) -> list[Any]:
    manual = placement or manual_placement(prefill=1, decode=2)
    resource = LLMDeployment.model_validate(chat(placement=manual, witness=witness or {}))
    pods = [ObservedPod(name, name, Role.DECODE, "r", ready=True) for name in gb_per_s]
    known = {
        name: FleetInstance(
            name,
            kv_path=KvPath(rate is not None, "nixl", 1.0, (rate or 0) * 1e9, "p -> d", pull_ms),
            kv_pairs=(pairs or {}).get(name, KvPairs()),
        )
        for name, rate in gb_per_s.items()
    }
    view = DeploymentView(
        resolve_in_cluster(resource),
        build_inventory([]),
        0.0,
        pods=tuple(pods),
        instances=known or None,
    )
    pools = build_pools(resource, machines)
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
        # A manual placement: the link of the nodes.
        ({"kvLink": RATE["predicted"]["kvLink"]}, {"a": 1.25}, False, "BelowPlan"),
        ({"kvLink": RATE["predicted"]["kvLink"]}, {"a": 17.0}, True, "AsPlanned"),
    ],
)
def test_the_slowest_path_is_compared_with_the_plan(
    plan: dict[str, Any] | None, rates: dict[str, float | None], status: bool | None, reason: str
) -> None:
    _, rate, _ = conditions(plan, **rates)
    assert (rate.type, rate.status, rate.reason) == ("KVRateAsPlanned", status, reason)


def test_a_slow_path_names_its_instance_both_rates_and_a_remedy() -> None:
    verified, rate, _ = conditions(RATE, fast=17.0, slow=1.25)
    assert verified.status
    assert "slow measured 1.25 GB/s per GPU (nixl)" in rate.message
    assert "the plan assumes 18 GB/s (InfiniBand)" in rate.message
    assert "planning.network" in rate.message
    within = {"predicted": {"kvLink": {"kind": "NVLink", "gbPerS": 360.0}}}
    _, rate, _ = conditions(within, slow=1.25)
    assert "CUDA IPC" in rate.message
    assert "planning.affinity High" in rate.message


def test_a_test_as_short_as_its_fixed_costs_says_nothing_about_the_rate() -> None:
    # 335 MB, which NVLink moves within its latency, and the same through host memory.
    within = {"predicted": {"kvLink": {"kind": "NVLink", "gbPerS": 360.0}}}
    _, rate, _ = conditions(within, pull_ms=4.2, a=80.0)
    assert (rate.status, rate.reason) == (None, "NotMeasured")
    assert "the test took 4.2 ms: too short for a rate" in rate.message
    _, rate, _ = conditions(within, pull_ms=67.0, a=5.0)
    assert (rate.status, rate.reason) == (False, "BelowPlan")
    _, rate, _ = conditions(within, pull_ms=1.0, a=335.0)
    assert (rate.status, rate.reason) == (True, "AsPlanned")


def test_only_pools_without_a_prefill_instance_transfer_no_kv() -> None:
    mixed = {"manual": [{"role": "mixed"}]}
    assert [each.reason for each in conditions(RATE, mixed, a=1.0)] == ["NotNeeded"] * 3
    cells = {"manual": [{"role": role, "perCell": 1} for role in ("prefill", "decode")]}
    verified, rate, _ = conditions(RATE, cells, NodeTopology({"H100": 8}), cell=1.0)
    assert (verified.reason, rate.reason) == ("Verified", "BelowPlan")


GOOD = KvPairs(total=4, proven=4, oldest_s=12.0, bytes_per_s=1.9e9, pull_ms=50.0)
BAD = KvPairs(
    total=4,
    proven=3,
    closed=("p1",),
    num_closed=1,
    oldest_s=40.0,
    bytes_per_s=2.4e9,
    reason="p1 -> b: it pulled 0 bytes",
)
GONE = KvPairs(4, 0, ("p0", "p1", "p2", "p3"), 4, reason="p0 -> b: the first token differs")


@pytest.mark.parametrize(
    ("second", "status", "reason", "message"),
    [
        (GOOD, True, "Proven", "8 of 8 pairs proven, oldest 12 s, 1.9 GB/s at least"),
        (
            BAD,
            False,
            "PairsFailed",
            "1.9 GB/s at least; 1 not used: p1 -> b: it pulled 0 bytes",
        ),
        (
            GONE,
            False,
            "PairsFailed",
            "4 not used, among them all of b: p0 -> b: the first token differs",
        ),
        (KvPairs(total=4, proven=3, oldest_s=3.0), None, "NotProven", "7 of 8 pairs proven"),
        (KvPairs(total=4, proven=4, oldest_s=601.0), None, "Stale", "oldest 601 s"),
    ],
)
def test_pairs_are_counted_and_the_first_fault_is_named(
    second: KvPairs, status: bool | None, reason: str, message: str
) -> None:
    *_, proven = conditions(pairs={"a": GOOD, "b": second}, a=1.0, b=1.0)
    assert (proven.type, proven.status, proven.reason) == ("KVPathProven", status, reason)
    assert message in proven.message


def test_a_prefill_instance_that_no_decode_instance_may_use_is_named() -> None:
    first = KvPairs(2, 1, ("p1",), 1, reason="p1 -> a: it pulled 0 bytes")
    second = KvPairs(2, 1, ("p1",), 1, reason="p1 -> b: it pulled 0 bytes")
    *_, proven = conditions(pairs={"a": first, "b": second}, a=1.0, b=1.0)
    assert "2 not used, among them all of p1: p1 -> a" in proven.message


def test_without_canaries_nothing_is_proven_and_the_field_is_named() -> None:
    *_, proven = conditions(witness={"engineShare": 0}, a=1.0)
    assert (proven.status, proven.reason) == (None, "Off")
    assert "spec.witness.engineShare is 0" in proven.message


def test_rates_of_canaries_are_compared_with_the_plan_too() -> None:
    slow = KvPairs(total=4, proven=4, bytes_per_s=1.2e9, pull_ms=60.0)
    _, rate, _ = conditions(RATE, pairs={"a": slow}, a=17.0)
    assert (rate.status, rate.reason) == (False, "BelowPlan")
    assert "a measured 1.2 GB/s per GPU (canary handoffs)" in rate.message
    short = KvPairs(total=4, proven=4, bytes_per_s=1.2e9, pull_ms=2.0)
    _, rate, _ = conditions(RATE, pairs={"a": short}, a=1.25)
    assert (rate.status, rate.reason) == (False, "BelowPlan"), "the self-test was long enough"


def test_the_next_plan_counts_on_the_slowest_rate_that_own_cells_have_shown() -> None:
    nodes = {"nodes": [{"gpu": "H100"}]}
    declared = {"kind": "Ethernet", "cellBandwidthGbps": 2880}
    cluster = Cluster.model_validate(nodes)
    manual = {"manual": [{"role": role, "perCell": 1} for role in ("prefill", "decode")]}
    resource = LLMDeployment.model_validate(chat(placement=manual, engine={"connector": "Nixl"}))
    cells = build_pools(resource, NodeTopology.from_cluster(cluster))
    apart = build_pools(resource, NodeTopology())
    known = {
        name: FleetInstance(name, kv_path=KvPath(True, "nixl", 1.0, rate * 1e9, "p -> d", 9.0))
        for name, rate in {"a": 200.0, "b": 150.0}.items()
    }
    seen = with_measured_cells(cluster, cells, known).network
    assert seen is not None
    assert seen.cell_bandwidth_gbps == 1200
    assert with_measured_cells(cluster, apart, known) == cluster
    assert with_measured_cells(cluster, cells, None) == cluster
    other = Cluster.model_validate({**nodes, "network": declared})
    assert with_measured_cells(other, cells, known) == other
