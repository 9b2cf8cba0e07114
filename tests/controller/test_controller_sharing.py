"""Deployments of one cluster that plan at the same moment: the whole operator, in memory."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from cleave.api.deployment import LLMDeployment
from cleave.controller.cluster.actions import Action, Emit, PatchStatus, PlanJob
from cleave.controller.cluster.gateway_client import GatewayClient
from cleave.controller.cluster.inventory import PlanMachines
from cleave.controller.controller import WAKE_PERIOD_S, Controller
from cleave.controller.metrics import OperatorMetrics
from cleave.controller.settings import OperatorSettings
from cleave.manifests.labels import Manifest

from tests.support.fake_cluster import SmallCluster, chat, node

WORKLOAD = {"rate": 1, "promptTokens": {"mean": 100}, "outputTokens": {"mean": 10}}
NEEDED = 6
"""GPUs of each plan."""


async def no_answers(_urls: object, _engine_counts: object) -> None:
    return None


async def plan(
    _deployment: LLMDeployment, machines: PlanMachines, job: PlanJob, _group: str | None
) -> PlanJob:
    """A planner that takes as many mixed instances of one GPU as it needs, after a while."""
    for _ in range(3):
        await asyncio.sleep(0)
    total = machines.cluster.total_gpus if machines.cluster else 0
    if min(total, machines.max_gpus or total) < NEEDED:
        return replace(job, infeasible=f"too few GPUs; {machines.taken}")
    pools = [{"role": "mixed", "replicas": NEEDED}]
    selected = {"revision": "r", "reason": "", "gpus": NEEDED, "pools": pools}
    return replace(job, plan={**selected, "algorithm": "Colocated", "inputs": job.inputs_hash})


class ControlPlane:
    """An operator on a cluster; nothing is reconciled but what changes enqueue."""

    def __init__(self, cluster: SmallCluster) -> None:
        self.cluster = cluster
        self.late: list[tuple[str, Manifest]] = []
        cluster.watchers.append(lambda kind, each: self.late.append((kind, each)))
        self.late += [("LISTED", each) for each in cluster.objects.values()]
        self.controller = Controller(
            OperatorSettings(),
            OperatorMetrics(),
            now=lambda: cluster.now_s,
            clock=lambda: cluster.now_s,
            gateways=GatewayClient(lambda: cluster.now_s, fetch=no_answers),
            debounce_s=0,
        )
        self.controller.planner._run_in_process = plan  # type: ignore[method-assign]

    async def carry_out(self, actions: Iterable[Action]) -> None:
        for how, manifest in self.cluster.do(actions):
            # Another worker of the operator, or the planner, may run between two writes.
            await asyncio.sleep(0)
            (self.controller.on_change if how == "seen" else self.controller.on_delete)(manifest)

    async def run(self, turns: int = 30) -> None:
        queue = self.controller.queue
        for _ in range(turns):
            self.cluster.now_s += 1
            self.cluster.settle()
            for kind, manifest in self.late:
                handle = self.controller
                (handle.on_delete if kind == "DELETED" else handle.on_change)(manifest)
            self.late.clear()
            keys = [await queue.take() for _ in range(len(queue))]
            await asyncio.gather(*(self.controller._reconcile(key, self) for key in keys))  # type: ignore[arg-type]
            for key in keys:
                queue.mark_done(key)
            for _ in range(10):
                await asyncio.sleep(0)


def deploy(cluster: SmallCluster, name: str, **planning: Any) -> None:
    declared = chat(
        model="meta-llama/Llama-3.1-8B",
        engine={"type": "vLLM"},
        workload=WORKLOAD,
        planning=planning,
    )
    cluster.add({**declared, "metadata": {**declared["metadata"], "name": name}})


def build_free_pool(replicas: int) -> Manifest:
    """The pool of a deployment that does not exist."""
    spec = {"deployment": "other", "role": "mixed", "revision": "r", "model": "m"}
    return {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "InstancePool",
        "metadata": {"name": "other-mixed", "namespace": "default"},
        "spec": {**spec, "engine": {"type": "vLLM"}, "replicas": replicas},
    }


def read_condition(cluster: SmallCluster, name: str, kind: str) -> tuple[str, str]:
    deployment = cluster.get("LLMDeployment", name)
    assert deployment is not None
    states = {each["type"]: each for each in deployment["status"]["conditions"]}
    return states[kind]["status"], states[kind]["message"]


def read_plan(cluster: SmallCluster, name: str) -> tuple[str, str]:
    return read_condition(cluster, name, "PlanReady")


def count_pods(cluster: SmallCluster, name: str) -> int:
    """Pods of a deployment with a node."""
    return sum(
        pod["metadata"]["labels"]["cleave.dev/deployment"] == name and "nodeName" in pod["spec"]
        for pod in cluster.pods()
    )


def count_requested_gpus(cluster: SmallCluster) -> int:
    (containers,) = zip(*(pod["spec"]["containers"] for pod in cluster.pods()), strict=True)
    return sum(int(each["resources"]["limits"]["nvidia.com/gpu"]) for each in containers)


async def test_two_deployments_do_not_plan_with_the_same_gpus() -> None:
    cluster = SmallCluster()
    cluster.add(node(gpus=8))
    for name in ("one", "two"):
        deploy(cluster, name)
    here = ControlPlane(cluster)
    await here.run()
    assert read_plan(cluster, "one")[0] == "True"
    status, message = read_plan(cluster, "two")
    assert status == "False"
    assert "too few GPUs; other deployments have 6 of 8 GPUs" in message
    assert count_requested_gpus(cluster) == NEEDED

    # A new operator has no memory of plans.
    restarted = ControlPlane(cluster)
    deploy(cluster, "three")
    await restarted.run()
    assert [read_plan(cluster, name)[0] for name in ("one", "two", "three")] == [
        "True",
        "False",
        "False",
    ]
    assert count_requested_gpus(cluster) == NEEDED

    # What is given back is planned at once, without waiting for a resync, and once.
    cluster.remove("LLMDeployment", "one")
    await restarted.run(60)
    assert cluster.get("LLMDeployment", "one") is None
    assert sorted(read_plan(cluster, name)[0] for name in ("two", "three")) == ["False", "True"]
    assert count_requested_gpus(cluster) == NEEDED


async def test_more_nodes_serve_both() -> None:
    cluster = SmallCluster()
    cluster.add(node(gpus=8))
    for name in ("one", "two"):
        deploy(cluster, name)
    here = ControlPlane(cluster)
    await here.run()
    cluster.add(node("n2", gpus=8))
    await here.run()
    assert [read_plan(cluster, name)[0] for name in ("one", "two")] == ["True", "True"]
    assert count_requested_gpus(cluster) == 2 * NEEDED


async def test_what_scales_up_and_down_elsewhere_causes_few_plans() -> None:
    cluster = SmallCluster()
    cluster.add(node(gpus=8))
    deploy(cluster, "big")
    here, jobs = ControlPlane(cluster), []

    async def count(*job: Any) -> PlanJob:
        jobs.append(cluster.now_s)
        return await plan(*job)

    here.controller.planner._run_in_process = count  # type: ignore[method-assign]
    cluster.add(build_free_pool(replicas=4))
    await here.run()
    jobs.clear()
    for replicas in (5, 6, 7, 8):
        cluster.edit("InstancePool", "other-mixed", replicas=replicas)
        await here.run(3)
    assert not jobs, "fewer free GPUs are no reason"
    for _ in range(30):
        for replicas in (7, 8):
            cluster.edit("InstancePool", "other-mixed", replicas=replicas)
            await here.run(3)
    # 180 s: one per period, and one more where GPUs were taken while it was made.
    assert 2 <= len(jobs) <= 8
    cluster.edit("InstancePool", "other-mixed", replicas=1)
    await here.run(int(WAKE_PERIOD_S) + 10)
    assert read_plan(cluster, "big")[0] == "True"


async def test_a_fault_in_what_others_claim_does_not_end_the_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = SmallCluster()
    cluster.add(node(gpus=8))
    deploy(cluster, "one")
    here = ControlPlane(cluster)

    def fail() -> bool:
        raise ValueError("a bug")

    monkeypatch.setattr(here.controller._reservations, "take_gain", fail)
    await here.run()
    assert read_plan(cluster, "one")[0] == "True"
    assert "its GPUs are not counted" in caplog.text


async def test_a_quota_is_kept_and_what_it_grows_by_is_planned() -> None:
    cluster = SmallCluster()
    cluster.add(node(gpus=16))
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "gpus", "namespace": "default"},
        "spec": {"hard": {"requests.nvidia.com/gpu": "8"}},
    }
    cluster.add(quota)
    for name in ("one", "two"):
        deploy(cluster, name)
    here = ControlPlane(cluster)
    await here.run()
    status, message = read_plan(cluster, "two")
    assert (read_plan(cluster, "one")[0], status) == ("True", "False")
    assert "ResourceQuota gpus leaves 2 of 8 GPUs; other deployments have 6 of 16 GPUs" in message
    assert count_requested_gpus(cluster) == NEEDED
    cluster.edit("ResourceQuota", "gpus", hard={"requests.nvidia.com/gpu": "12"})
    await here.run()
    assert read_plan(cluster, "two")[0] == "True"
    assert count_requested_gpus(cluster) == 2 * NEEDED


async def test_a_higher_priority_borrows_gpus_and_gives_them_back() -> None:
    cluster = SmallCluster(room=8)
    cluster.add(node(gpus=8))
    deploy(cluster, "low", minGPUs=2)
    here = ControlPlane(cluster)
    await here.run()
    assert count_pods(cluster, "low") == NEEDED
    deploy(cluster, "equal")
    await here.run()
    assert read_plan(cluster, "equal")[0] == "False"
    assert count_pods(cluster, "low") == NEEDED, "an equal priority takes nothing"

    plan_before = cluster.get("LLMDeployment", "low")
    deploy(cluster, "high", priority=10)
    await here.run()
    assert (count_pods(cluster, "low"), count_pods(cluster, "high")) == (2, NEEDED)
    limited = read_condition(cluster, "low", "ScalingLimited")
    assert limited == ("True", "lends 4 of 6 GPUs to default/high (priority 10)")
    assert read_condition(cluster, "low", "Ready")[0] == "True"
    plan_now = cluster.get("LLMDeployment", "low")
    assert plan_before is not None
    assert plan_now is not None
    assert plan_now["status"]["plan"] == plan_before["status"]["plan"]
    assert [each.message for each in cluster.events if each.reason == "GPUsLent"] == [limited[1]]

    # A new operator decides the same.
    log = len(cluster.log)
    here = ControlPlane(cluster)
    await here.run()
    assert all(isinstance(each, PatchStatus | Emit) for each in cluster.log[log:])

    cluster.remove("LLMDeployment", "equal")
    cluster.remove("LLMDeployment", "high")
    await here.run(int(WAKE_PERIOD_S) + 60)
    assert count_pods(cluster, "low") == NEEDED
    assert read_condition(cluster, "low", "ScalingLimited")[0] == "False"
    assert "ReplicasSetBack" not in {each.reason for each in cluster.events}


async def test_a_guarantee_is_kept_in_the_quota_too() -> None:
    cluster = SmallCluster(room=9)
    cluster.add(node(gpus=16))
    spec = {"hard": {"requests.nvidia.com/gpu": "9"}}
    head = {"apiVersion": "v1", "kind": "ResourceQuota"}
    cluster.add({**head, "metadata": {"name": "gpus", "namespace": "default"}, "spec": spec})
    deploy(cluster, "low", minGPUs=3)
    here = ControlPlane(cluster)
    await here.run()
    deploy(cluster, "high", priority=10)
    await here.run()
    assert (count_pods(cluster, "low"), count_pods(cluster, "high")) == (3, NEEDED)
