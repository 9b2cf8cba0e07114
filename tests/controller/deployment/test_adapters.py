"""Which instances get orders of adapters, and what the status says of them."""

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from cleave.api.deployment import LLMDeployment
from cleave.api.role import Role
from cleave.controller.cluster.actions import Apply, Create, Delete, OrderAdapters, Requeue
from cleave.controller.cluster.gateway_client import GatewayClient
from cleave.controller.cluster.objects import ObservedPod, group_instances
from cleave.controller.deployment.adapters import build_conditions, list_orders, to_sources
from cleave.controller.deployment.reconcile import reconcile
from cleave.controller.views import DeploymentView
from cleave.planner.resolved_deployment import resolve_in_cluster
from cleave.policy.adapters import AdapterSource, hash_adapters
from cleave.rpc.credentials import AgentEndpoint
from cleave.rpc.fleet_status import FleetInstance, KvPath

from tests.controller.test_convergence import condition, control_plane
from tests.support import deployment_views
from tests.support.built_pools import hash_revision
from tests.support.fake_cluster import manual_placement

ADAPTERS = [{"name": "sql", "source": "/data/sql"}, {"name": "law", "source": "org/law"}]
SOURCES = (AdapterSource("sql", "/data/sql"), AdapterSource("law", "org/law"))
DIGEST = hash_adapters(SOURCES)


def deploy(adapters: list[dict[str, str]] = ADAPTERS, **spec: Any) -> LLMDeployment:
    engine = {"type": "Emulated", "args": ["--enable-lora"]}
    return deployment_views.deployment(**{"engine": engine, "adapters": adapters, **spec})


def pod(name: str, **fields: Any) -> ObservedPod:
    known = {"ready": True, "ip": "10.0.0.1", "namespace": "llm"}
    return ObservedPod(name, f"u-{name}", Role.DECODE, "a", **known | fields)


def view(deployment: LLMDeployment, *pods: ObservedPod, **reported: FleetInstance | None):
    instances = {name: each for name, each in reported.items() if each is not None}
    status = deployment_views.status(deployment)
    return deployment_views.view(deployment, status, pods=pods, instances=instances)


def report(digest: str = "", pending: int = 0, fault: str = "") -> FleetInstance:
    return FleetInstance("d", adapters_digest=digest, adapters_pending=pending, adapter_fault=fault)


def test_instances_whose_adapters_differ_get_an_order() -> None:
    pods = [pod("a"), pod("b"), pod("c"), pod("d")]
    other = hash_adapters(SOURCES[:1])
    seen = view(deploy(), *pods, a=report(), b=report(DIGEST, 2), c=report(other), d=None)
    first, second, again = list_orders(seen)
    assert isinstance(first, OrderAdapters)
    assert isinstance(second, OrderAdapters)
    assert (first.target.name, second.target.name) == ("a", "c")
    assert (first.adapters, first.generation) == (SOURCES, 2)
    # The uid is that of the pod, whatever answers at its address.
    assert first.agents == (AgentEndpoint("10.0.0.1:9000", "a", pod("a").uid),)
    assert isinstance(again, Requeue)


def test_without_adapters_only_instances_that_have_some_get_an_order() -> None:
    seen = view(deploy([]), pod("a"), pod("b"), a=report(), b=report(DIGEST))
    order, _ = list_orders(seen)
    assert isinstance(order, OrderAdapters)
    assert (order.target.name, order.adapters) == ("b", ())


def test_every_agent_of_a_pod_gets_the_order() -> None:
    seen = view(deploy(), pod("a", num_engines=3, ip="fd00::1"), a=report("/" + DIGEST))
    order, _ = list_orders(seen)
    assert isinstance(order, OrderAdapters)
    addresses = [each.address for each in order.agents]
    assert addresses == ["[fd00::1]:9000", "[fd00::1]:9002", "[fd00::1]:9004"]


def test_every_agent_of_all_pods_gets_the_order() -> None:
    leader, further = pod("a", num_engines=2), pod("a-1", num_engines=2, ip="10.0.0.2")
    pods = [leader, replace(further, instance="a", is_multi_node_worker=True)]
    (whole,) = group_instances(pods, 2)
    order, _ = list_orders(view(deploy(), whole, a=report("/" + DIGEST)))
    assert isinstance(order, OrderAdapters)
    found = [(each.address, each.pod) for each in order.agents]
    assert found == [
        ("10.0.0.1:9000", "a"), ("10.0.0.1:9002", "a"),
        ("10.0.0.2:9000", "a-1"), ("10.0.0.2:9002", "a-1"),
    ]  # fmt: skip


@pytest.mark.parametrize("fields", [{"deleting": True}, {"ip": ""}, {"phase": "Failed"}])
def test_instances_that_end_or_have_no_address_get_none(fields: dict[str, Any]) -> None:
    assert list(list_orders(view(deploy(), pod("a", **fields), a=report()))) == []


def test_nothing_is_ordered_before_gateways_report_or_while_changes_wait() -> None:
    seen = replace(view(deploy(), pod("a")), instances=None)
    assert list(list_orders(seen)) == []
    seen = view(deploy(paused=True), pod("a"), a=report())
    assert not [each for each in reconcile(seen) if isinstance(each, OrderAdapters)]


def test_a_changed_list_restarts_and_replaces_nothing() -> None:
    before, after = deploy(ADAPTERS[:1]), deploy()
    assert hash_revision(before) == hash_revision(after)
    seen = view(before, pod("a"), a=report())
    seen = replace(seen, resolved=resolve_in_cluster(after))
    actions = reconcile(seen)
    assert [each for each in actions if isinstance(each, OrderAdapters)]
    assert not [each for each in actions if isinstance(each, Create | Delete)]
    applied = [each.manifest for each in actions if isinstance(each, Apply)]
    pools = [each["spec"] for each in applied if each["kind"] == "InstancePool"]
    assert [each["adapters"] for each in pools] == [ADAPTERS] * 2
    assert not [each for each in applied if each["kind"] == "Deployment" and "lora" in str(each)]


@pytest.mark.parametrize(
    ("reports", "status", "reason", "text"),
    [
        ({}, None, "NotReported", "no gateway has reported"),
        (
            {"a": report(DIGEST), "b": report(DIGEST)},
            *(True, "Loaded", "2 of 2 instances have loaded 2 adapters"),
        ),
        (
            {"a": report(DIGEST), "b": report(DIGEST, 1)},
            *(False, "Loading", "1 of 2 instances have loaded 2 adapters; d loads them"),
        ),
        ({"a": report(), "b": report()}, False, "Loading", "0 of 2"),
        (
            {
                "a": report(DIGEST, 1, "sql: the engine answers 404: No adapter found"),
                "b": report(),
            },
            *(False, "LoadFailed", "d: sql: the engine answers 404: No adapter found"),
        ),
        ({"a": report("x", 1, "law: of an earlier order"), "b": report()}, False, "Loading", ""),
    ],
)
def test_the_condition_counts_instances_and_quotes_the_engine(
    reports: dict[str, FleetInstance], status: bool | None, reason: str, text: str
) -> None:
    (condition,) = build_conditions(view(deploy(), pod("a"), pod("b"), **reports))
    assert (condition.status, condition.reason) == (status, reason)
    assert text in condition.message


def test_a_deployment_without_adapters_has_no_such_condition() -> None:
    seen: DeploymentView = view(deploy([]), pod("a"), a=report())
    assert list(build_conditions(seen)) == []


def test_instances_that_are_not_ready_do_not_count() -> None:
    seen = view(deploy(), pod("a"), pod("b", ready=False), a=report(DIGEST), b=report())
    (condition,) = build_conditions(seen)
    assert condition.status is True


def test_sources_are_those_of_the_spec() -> None:
    assert tuple(to_sources(deploy().spec.adapters)) == SOURCES


class Fleet:
    """The operator with a cluster in memory, whose agents follow orders as gateways report it."""

    def __init__(self, **spec: Any) -> None:
        self.here = control_plane(**spec)
        self.reported: dict[str, FleetInstance] = {}
        self.fault = ""
        gateways = GatewayClient(lambda: self.here.cluster.now_s, fetch=self.fetch)
        self.here.controller._gateways = gateways
        self.here.controller.cache.list_gateways = lambda _: ["10.1.0.1"]  # type: ignore[method-assign]

    async def fetch(self, _urls: Any, _counts: Any) -> dict[str, FleetInstance]:
        for action in self.orders:
            digest, failed = hash_adapters(action.adapters), bool(self.fault)
            self.reported[action.target.name] = report(digest, int(failed), self.fault)
        return {name: self._describe(name) for name in self._list_pods()}

    def _list_pods(self) -> list[str]:
        return [each["metadata"]["name"] for each in self.here.cluster.pods()]

    def _describe(self, pod: str) -> FleetInstance:
        role = pod.split("-")[1]
        known = {"role": role, "home": role, "state": "ready", "selectable": True}
        adapters = self.reported.get(pod, report())
        return structs.replace(adapters, name=pod, kv_path=KvPath(verified=True), **known)

    @property
    def orders(self) -> list[OrderAdapters]:
        return [each for each in self.here.cluster.log if isinstance(each, OrderAdapters)]

    @property
    def uids(self) -> set[str]:
        return {pod["metadata"]["uid"] for pod in self.here.cluster.pods()}

    def edit(self, adapters: list[dict[str, str]]) -> None:
        self.here.cluster.edit("LLMDeployment", "chat", adapters=adapters)
        self.here.converge()


def test_an_edit_reaches_every_instance_once_and_replaces_none() -> None:
    engine = {"type": "Emulated", "args": ["--enable-lora"]}
    fleet = Fleet(engine=engine, placement=manual_placement(prefill=1, decode=2))
    fleet.here.converge()
    uids = fleet.uids
    assert fleet.orders == []
    for number, adapters in enumerate((ADAPTERS[:1], ADAPTERS, []), 1):
        fleet.edit(adapters)
        assert len(fleet.orders) == 3 * number
        assert fleet.uids == uids
        if adapters:
            assert condition(fleet.here.cluster, "AdaptersLoaded")["status"] == "True"
        assert condition(fleet.here.cluster, "Ready")["status"] == "True"
        specs = [each["spec"] for each in fleet.here.cluster.all("InstancePool")]
        assert [each.get("adapters", []) for each in specs] == [adapters] * 2


def test_an_engines_sentence_is_in_the_condition_and_the_model_stays_ready() -> None:
    engine = {"type": "Emulated", "args": ["--enable-lora"]}
    fleet = Fleet(engine=engine)
    fleet.here.converge()
    fleet.fault = "sql: the engine answers 404: No adapter found for /data/sql"
    fleet.edit(ADAPTERS)
    found = condition(fleet.here.cluster, "AdaptersLoaded")
    assert (found["status"], found["reason"]) == ("False", "LoadFailed")
    assert "No adapter found for /data/sql" in found["message"]
    assert condition(fleet.here.cluster, "Ready")["status"] == "True"
    assert len(fleet.orders) == 2, "the agents try again by themselves"
