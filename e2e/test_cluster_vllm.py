"""The real engine on a real control plane: vLLM on CPU, KV handed over by Cleave's connector.

The model is one that Cleave does not know. Its plan follows from what vLLM reports.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cleave.perf.model import model_report

from e2e.cluster.cluster import Cluster, wait_until
from e2e.support.deployments import start_fast
from e2e.test_cluster_models import is_planned
from e2e.test_cluster_operator import Chat, condition, installation, message
from e2e.test_cluster_scaling import homes, lives

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

START_S = 420


@pytest.fixture
def chat(cluster: Cluster, namespace: str, tiny_model: Path) -> Iterator[Chat]:
    """A model in a folder of the nodes: the smallest pair, until vLLM has reported the model."""
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
        # No instance may do both phases.
        "routing": {"fallback": "Never"},
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
            found.until_ready(START_S)
            yield found
        finally:
            cluster.kubectl("delete", "llmd", "chat", "-n", namespace, timeout_s=120)


def test_vllm_reports_an_unknown_model_serves_both_phases_and_changes_pools(
    chat: Chat, tiny_model: Path
) -> None:
    wait_until(lambda: "reportedModel" in chat.deployment["status"], 60, "the model is reported")
    reported = chat.deployment["status"]["reportedModel"]
    config = json.loads((tiny_model / "config.json").read_text())
    assert reported["config"] == model_report.select_config(config)
    assert condition(chat.deployment, "ModelAsReported") == "True"
    wait_until(lambda: is_planned(chat), START_S, "the plan counts with the reported model")
    assert chat.ask(tokens=12) == ""

    chat.edit({"placement": {"manual": [{"role": "prefill"}, {"role": "decode"}]}})
    wait_until(
        lambda: chat.is_ready() and condition(chat.deployment, "KVPathVerified") == "True",
        START_S,
        "both phases serve, and the KV path is proven",
    )
    print(message(chat.deployment, "KVPathVerified"))
    assert chat.ask(tokens=12) == ""

    before = lives(chat)
    chat.edit({"placement": {"manual": [{"role": "mixed", "replicas": 2}]}})
    wait_until(lambda: homes(chat) == {"mixed": 2} and chat.is_ready(), START_S, "both are mixed")
    assert lives(chat) == before, "the same pods, and the same lives of their engines"
    assert chat.ask(tokens=12) == ""
