"""Two deployments on the same GPUs: none is planned twice, quotas are kept, GPUs are lent and come
back."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from e2e.cluster.closed_loop_load import Load
from e2e.cluster.cluster import Cluster, wait_until
from e2e.cluster.nodes import Nodes, Shape, gpu_node
from e2e.test_cluster_operator import (
    READY_S,
    condition,
    deployed,
    installed,
    is_pod_ready,
    message,
    nodes,
    read_log,
)

__all__ = ["installed", "nodes"]
pytestmark = pytest.mark.timeout(900)

NODE, GPUS = "sharing-h200", 4
NEEDED = 3
"""GPUs of the plan of each deployment; its instances have one each."""
H200, TAINT = "NVIDIA-H200", {"key": "team", "value": "b", "effect": "NoSchedule"}
ODD = (
    gpu_node("odd-unknown", product="NVIDIA-NEW-X1"),
    gpu_node("odd-shared", product=f"{H200}-SHARED"),
    gpu_node("odd-part", product=f"{H200}-MIG-1g.18gb"),
    gpu_node("odd-unlabelled", product=""),
    replace(gpu_node("odd-mixed", product=H200), labels={"nvidia.com/mig.config": "all-balanced"}),
    replace(gpu_node("odd-sliced", product=H200), labels={"nvidia.com/gpu.replicas": "4"}),
    replace(gpu_node("odd-tainted", product=H200), taints=[TAINT]),
    Shape("odd-amd", gpus=0, devices={"amd.com/gpu": "8"}),
    Shape("odd-parts", gpus=0, devices={"nvidia.com/mig-1g.18gb": "7"}),
)
"""Nodes that plans leave out."""


LENDER = """
apiVersion: cleave.dev/v1alpha1
kind: LLMDeployment
metadata: {name: chat}
spec:
  model: {source: facebook/opt-13b, servedName: chat, maxModelLen: 8192}
  slo: {ttftMs: 400, tpotMs: 40}
  engine: {type: Emulated, emulated: {timeScale: 0.2}}
  planning: {minGPUs: 4}
  placement: {manual: [{role: mixed, replicas: 4}]}
  template: {resources: {limits: {nvidia.com/gpu: 4}}}
"""
"""It has all 16 GPUs of the two nodes of the installation; emulated engines serve with them."""


def build_manifest(name: str, **planning: Any) -> str:
    """A deployment that only the test's node can run. Its engines never start: without vLLM and
    the model's files there is nothing to serve, and plans and pods are the same."""
    spec = {
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "slo": {"ttftMs": 400, "tpotMs": 40},
        "engine": {"type": "vLLM", "image": "registry.example/vllm:1"},
        "workload": {"rate": 40, "promptTokens": {"mean": 2000}, "outputTokens": {"mean": 200}},
        "planning": {"gpus": [{"type": "H200"}], **planning},
    }
    head = {"apiVersion": "cleave.dev/v1alpha1", "kind": "LLMDeployment"}
    return json.dumps({**head, "metadata": {"name": name}, "spec": spec})


class Deployments:
    """Those of a namespace."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace

    def apply(self, *manifests: str) -> None:
        text = "\n---\n".join(manifests)
        self.cluster.kubectl("apply", "-n", self.namespace, "-f", "-", input=text)

    def delete(self, name: str) -> None:
        self.cluster.kubectl("delete", "llmd", name, "-n", self.namespace, timeout_s=180)

    def read(self, name: str) -> dict:
        return self.cluster.get("llmd", name, self.namespace) or {}

    def is_decided(self, name: str) -> bool:
        return condition(self.read(name), "PlanFeasible") in ("True", "False")

    def find_planned(self) -> list[str]:
        names = ("one", "two")
        return [each for each in names if condition(self.read(each), "PlanReady") == "True"]

    def names_odd_nodes(self, name: str) -> bool:
        text = message(self.read(name), "ScalingLimited")
        return all(f"{each.name}: " in text for each in ODD)

    def count_gpus(self, name: str = "", *, placed: bool = False) -> int:
        """That pods of a deployment, or of all, request; `placed`: of those with a node."""
        selector = f"cleave.dev/deployment={name}" if name else ""
        limits = (
            container["resources"].get("limits", {})
            for pod in self.cluster.list("pods", self.namespace, selector)
            if "nodeName" in pod["spec"] or not placed
            for container in pod["spec"]["containers"]
        )
        return sum(int(each.get("nvidia.com/gpu", 0)) for each in limits)


@contextmanager
def opened(installed: Cluster, nodes: Nodes, namespace: str, gpus: int) -> Iterator[Deployments]:
    """A node with GPUs and the deployments of a test; nothing is left afterwards."""
    before = {each["metadata"]["name"] for each in installed.list("nodes")}
    nodes.add(gpu_node(NODE, gpus=gpus, product=H200, gpu_memory_mib=143_771))
    try:
        yield Deployments(installed, namespace)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{read_log(installed)}") from error
    finally:
        installed.kubectl("delete", "llmd", "--all", "-n", namespace, timeout_s=180)
        added = {each["metadata"]["name"] for each in installed.list("nodes")} - before
        for name in added:
            nodes.lose(name)
        installed.kubectl("delete", "node", *added)


def test_gpus_are_planned_once_and_odd_nodes_change_no_plan(
    installed: Cluster, nodes: Nodes, namespace: str
) -> None:
    with opened(installed, nodes, namespace, GPUS) as here:
        here.apply(*map(build_manifest, ("one", "two")))
        wait_until(
            lambda: all(map(here.is_decided, ("one", "two"))), READY_S, "both are decided on"
        )
        (first,) = here.find_planned()
        second = "two" if first == "one" else "one"
        assert f"other deployments have {NEEDED} of" in message(here.read(second), "PlanReady")
        wait_until(lambda: here.count_gpus() == NEEDED, 60, "the pods exist")
        plan = here.read(first)["status"]["plan"]
        nodes.add(*ODD)
        wait_until(lambda: here.names_odd_nodes(first), 60, "each odd node is named")
        assert here.find_planned() == [first]
        assert here.read(first)["status"]["plan"] == plan
        here.delete(first)
        wait_until(lambda: here.find_planned() == [second], READY_S, "the other one is planned")
        assert here.read(second)["status"]["plan"]["gpus"] == NEEDED
        wait_until(lambda: here.count_gpus() == NEEDED, 60, "its pods exist")


def test_a_quota_is_kept_until_it_grows(installed: Cluster, nodes: Nodes, namespace: str) -> None:
    def set_quota(gpus: int) -> None:
        hard = {"requests.nvidia.com/gpu": str(gpus)}
        head = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "gpus"}}
        installed.apply({**head, "spec": {"hard": hard}}, namespace=namespace)

    with opened(installed, nodes, namespace, 2 * GPUS) as here:
        set_quota(GPUS)
        here.apply(*map(build_manifest, ("one", "two")))
        wait_until(
            lambda: all(map(here.is_decided, ("one", "two"))), READY_S, "both are decided on"
        )
        (first,) = here.find_planned()
        used = here.read(first)["status"]["plan"]["gpus"]
        assert used <= GPUS
        second = "two" if first == "one" else "one"
        left = f"ResourceQuota gpus leaves {GPUS - used} of {GPUS} GPUs"
        assert left in message(here.read(second), "PlanReady")
        wait_until(lambda: here.count_gpus() == used, 60, "the pods exist")
        set_quota(2 * GPUS)
        wait_until(lambda: len(here.find_planned()) == 2, READY_S, "both are planned")
        wait_until(lambda: used < here.count_gpus() <= 2 * GPUS, 60, "their pods exist")


def test_gpus_are_lent_under_load_and_come_back(
    installed: Cluster, nodes: Nodes, namespace: str
) -> None:
    here = Deployments(installed, namespace)

    def count_borrowed() -> int:
        planned = here.read("high").get("status", {}).get("plan", {}).get("gpus", 0)
        return planned if here.count_gpus("high", placed=True) == planned else 0

    with deployed(installed, namespace, LENDER) as chat, Load(chat.address, "chat") as load:
        wait_until(lambda: load.answered > 20, 30, "the load is on")
        here.apply(build_manifest("high", gpus=[], priority=10))
        try:
            borrowed = wait_until(count_borrowed, READY_S, "the plan has its GPUs")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{read_log(installed)}") from error
        lent = -(-borrowed // 4) * 4
        assert here.count_gpus("chat") == 16 - lent
        text = f"lends {lent} of 16 GPUs to {namespace}/high (priority 10)"
        assert message(chat.deployment, "ScalingLimited") == text
        wait_until(chat.is_ready, 30, "the lender is ready with what is left")
        during = load.answered
        wait_until(lambda: load.answered > during + 20, 30, "what is left answers")
        here.delete("high")
        wait_until(
            lambda: len(chat.workers()) == 4 and all(map(is_pod_ready, chat.workers())),
            120,
            "the GPUs are back",
        )
        after = load.answered
        wait_until(lambda: load.answered > after + 20, 30, "all answer")
    assert load.failures == []
