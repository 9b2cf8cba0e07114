"""Two deployments on the same GPUs: none is planned twice, what is given back is planned again."""

import json

import pytest

from e2e.cluster.cluster import Cluster, wait_until
from e2e.cluster.nodes import Nodes, gpu_node
from e2e.test_cluster_operator import condition, installed, message, nodes, read_log

__all__ = ["installed", "nodes"]
pytestmark = pytest.mark.timeout(600)

NODE, GPUS = "sharing-h200", 4
NEEDED = 3
"""GPUs of the plan of each deployment; its instances have one each."""


def build_manifest(name: str) -> str:
    """A deployment that only the test's node can run. Its engines never start: without vLLM and
    the model's files there is nothing to serve, and plans and pods are the same."""
    spec = {
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "slo": {"ttftMs": 400, "tpotMs": 40},
        "engine": {"type": "vLLM", "image": "registry.example/vllm:1"},
        "workload": {"rate": 40, "promptTokens": {"mean": 2000}, "outputTokens": {"mean": 200}},
        "planning": {"gpus": [{"type": "H200"}]},
    }
    head = {"apiVersion": "cleave.dev/v1alpha1", "kind": "LLMDeployment"}
    return json.dumps({**head, "metadata": {"name": name}, "spec": spec})


def test_gpus_are_planned_once(installed: Cluster, nodes: Nodes, namespace: str) -> None:
    def read(name: str) -> dict:
        return installed.get("llmd", name, namespace) or {}

    def is_decided(name: str) -> bool:
        return condition(read(name), "PlanFeasible") in ("True", "False")

    def find_planned() -> list[str]:
        names = ("one", "two")
        return [each for each in names if condition(read(each), "PlanReady") == "True"]

    def count_requested_gpus() -> int:
        limits = (
            container["resources"].get("limits", {})
            for pod in installed.list("pods", namespace)
            for container in pod["spec"]["containers"]
        )
        return sum(int(each.get("nvidia.com/gpu", 0)) for each in limits)

    nodes.add(gpu_node(NODE, gpus=GPUS, product="NVIDIA-H200", gpu_memory_mib=143_771))
    try:
        both = "\n---\n".join(map(build_manifest, ("one", "two")))
        installed.kubectl("apply", "-n", namespace, "-f", "-", input=both)
        wait_until(lambda: all(map(is_decided, ("one", "two"))), 180, "both are decided on")
        (first,) = find_planned()
        second = "two" if first == "one" else "one"
        assert f"other deployments have {NEEDED} of" in message(read(second), "PlanReady")
        wait_until(lambda: count_requested_gpus() == NEEDED, 60, "the pods exist")
        installed.kubectl("delete", "llmd", first, "-n", namespace, timeout_s=180)
        wait_until(lambda: find_planned() == [second], 120, "the other one is planned")
        wait_until(lambda: count_requested_gpus() == NEEDED, 60, "its pods exist")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{read_log(installed)}") from error
    finally:
        installed.kubectl("delete", "llmd", "--all", "-n", namespace, timeout_s=180)
        nodes.lose(NODE)
        installed.kubectl("delete", "node", NODE)
