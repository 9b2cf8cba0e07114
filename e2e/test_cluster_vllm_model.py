"""A model that Cleave does not know, with vLLM on a real control plane: the smallest pair serves it
until vLLM has reported the model, and the plan that follows from the report serves it then.

Run by `make e2e-vllm`: three engines start one after the other.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cleave.perf.model import model_report

from e2e.cluster.cluster import Cluster
from e2e.support.deployments import start_fast
from e2e.test_cluster_operator import Chat, condition, installation
from e2e.test_cluster_scaling import homes

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1000)]

START_S = 420


@pytest.fixture
def chat(cluster: Cluster, namespace: str, tiny_model: Path) -> Iterator[Chat]:
    """A deployment of a model in a folder of the nodes, without config and placement."""
    if cluster.nodes is None:
        pytest.skip("needs nodes that have a folder of this machine")
    found = Chat(cluster, namespace)
    spec = {
        "model": {
            "source": str(tiny_model),
            "servedName": "chat",
            "dtype": "float32",
            "maxModelLen": 4096,
        },
        "slo": {"ttftMs": 1000, "tpotMs": 200},
        # What vLLM found out about models; otherwise another process imports vLLM for it.
        "engine": start_fast(
            env=[{"name": "VLLM_CACHE_ROOT", "value": str(Path.home() / ".cache/vllm")}]
        ),
        "workload": {"rate": 1, "promptTokens": {"mean": 100}, "outputTokens": {"mean": 20}},
        "planning": {"maxGPUs": 2},
    }
    manifest = {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "chat"},
        "spec": spec,
    }
    with installation(cluster, "--set", "operator.args={--device=cpu}"):
        cluster.apply(manifest, namespace=namespace)
        try:
            # It is ready once the plan's instances serve instead of the pair.
            found.until_ready(2 * START_S)
            yield found
        finally:
            cluster.kubectl("delete", "llmd", "chat", "-n", namespace, timeout_s=120)


def test_what_vllm_reports_is_planned_and_serves(chat: Chat, tiny_model: Path) -> None:
    reported = chat.deployment["status"]["reportedModel"]
    config = json.loads((tiny_model / "config.json").read_text())
    assert reported["config"] == model_report.select_config(config)
    assert condition(chat.deployment, "ModelAsReported") == "True"
    # One instance that computes both phases holds the traffic of such a small model.
    assert homes(chat) == {"mixed": 1}
    assert condition(chat.deployment, "PlanReady") == "True"
    assert chat.ask(tokens=12) == ""
