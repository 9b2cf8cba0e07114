"""The real engine on a real control plane: vLLM on CPU, KV handed over by Cleave's connector."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from e2e.cluster.cluster import Cluster, wait_until
from e2e.support.deployments import start_fast
from e2e.test_cluster_operator import Chat, condition, installation, message
from e2e.test_cluster_scaling import homes, lives

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

START_S = 420


@contextmanager
def serving_vllm(
    cluster: Cluster, namespace: str, folder: Path, timeout_s: float, **spec: object
) -> Iterator[Chat]:
    """A deployment of a model in a folder of the nodes, ready; `spec`: what is not usual."""
    if cluster.nodes is None:
        pytest.skip("needs nodes that have a folder of this machine")
    # What vLLM found out about models; otherwise another process imports vLLM for it.
    cache = {"name": "VLLM_CACHE_ROOT", "value": str(Path.home() / ".cache/vllm")}
    source = {"source": str(folder), "servedName": "chat", "dtype": "float32", "maxModelLen": 4096}
    usual = {
        "model": source,
        "slo": {"ttftMs": 1000, "tpotMs": 200},
        "engine": start_fast(env=[cache]),
    }
    manifest = {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "chat"},
        "spec": usual | spec,
    }
    found = Chat(cluster, namespace)
    with installation(cluster, "--set", "operator.args={--device=cpu}"):
        cluster.apply(manifest, namespace=namespace)
        try:
            found.until_ready(timeout_s)
            yield found
        finally:
            cluster.kubectl("delete", "llmd", "chat", "-n", namespace, timeout_s=120)


@pytest.fixture
def chat(cluster: Cluster, namespace: str, speaking_model: Path) -> Iterator[Chat]:
    """One prefill and one decode instance; none may do both phases. Contexts are short, as engines
    test each other with a long prompt when they start."""
    model = {"source": str(speaking_model), "servedName": "chat", "dtype": "float32"}
    model["maxModelLen"] = 1024
    pair = {"manual": [{"role": "prefill"}, {"role": "decode"}]}
    routing = {"fallback": "Never"}
    with serving_vllm(
        cluster, namespace, speaking_model, START_S, model=model, placement=pair, routing=routing
    ) as found:
        yield found


def answer(chat: Chat, question: str) -> str:
    """The text of a greedy answer."""
    messages = [{"role": "user", "content": question}]
    body = {"model": "chat", "messages": messages, "max_tokens": 12, "temperature": 0}
    found = httpx.post(f"http://{chat.address}/v1/chat/completions", json=body, timeout=120)
    assert found.status_code == 200, found.text
    text: str = found.json()["choices"][0]["message"]["content"]
    return text


def test_vllm_answers_through_both_phases_and_changes_pools(chat: Chat) -> None:
    assert "Paris" in answer(chat, "What is the capital of France?")
    wait_until(
        lambda: condition(chat.deployment, "KVPathVerified") == "True", 120, "the KV path is proven"
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
    assert "Paris" in answer(chat, "What is the capital of France?")
