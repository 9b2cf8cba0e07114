"""The real engine on a real control plane: vLLM on CPU, KV handed over by Cleave's connector."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster.cluster import Cluster, wait_until
from e2e.support.deployments import start_fast
from e2e.test_cluster_operator import Chat, condition, installation, message
from e2e.test_cluster_scaling import homes, lives

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

START_S = 420


@pytest.fixture
def chat(cluster: Cluster, namespace: str, tiny_model: Path) -> Iterator[Chat]:
    """One prefill and one decode instance of a model in a folder of the nodes."""
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
        "placement": {"manual": [{"role": "prefill"}, {"role": "decode"}]},
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


def test_vllm_answers_through_both_phases_and_changes_pools(chat: Chat) -> None:
    assert chat.ask(tokens=12) == ""
    wait_until(
        lambda: condition(chat.deployment, "KVPathVerified") == "True", 30, "the KV path is proven"
    )
    print(message(chat.deployment, "KVPathVerified"))
    # Cleave knows this model from what vLLM reports.
    wait_until(
        lambda: condition(chat.deployment, "ModelAsReported") == "True", 60, "it is reported"
    )
    before = lives(chat)
    chat.edit({"placement": {"manual": [{"role": "mixed", "replicas": 2}]}})
    wait_until(lambda: homes(chat) == {"mixed": 2} and chat.is_ready(), START_S, "both are mixed")
    assert lives(chat) == before, "the same pods, and the same lives of their engines"
    assert chat.ask(tokens=12) == ""
