"""Plans that follow traffic, on a real control plane, with emulated engines behind real gateways."""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from test_cluster_operator import Chat, condition, installation, message, told

from cluster.cluster import Cluster, wait_until
from cluster.stream import Kind, Stream

pytestmark = pytest.mark.timeout(400)

CODE = Kind(rate=4, prompt_tokens=500, output_tokens=16)
CONVERSATION = Kind(rate=12, prompt_tokens=200, output_tokens=150)
PATIENCE_S = 180


def manifest(kind: Kind, engine: dict[str, Any], **planning: Any) -> str:
    """A deployment that is planned for a kind of traffic, and looked at every ten seconds."""

    def lengths(mean: float) -> dict[str, float]:
        return {"mean": mean, "p90": mean * 1.67}

    document = {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "chat"},
        "spec": {
            "model": {"source": "facebook/opt-13b", "servedName": "chat", "maxModelLen": 2048},
            "slo": {"ttftMs": 800, "tpotMs": 80},
            "engine": {"type": "Emulated", "emulated": {"timeScale": 2.0}, **engine},
            "workload": {
                "rate": kind.rate,
                "promptTokens": lengths(kind.prompt_tokens),
                "outputTokens": lengths(kind.output_tokens),
            },
            "planning": {
                "maxGPUs": 8,
                "disaggregation": "Always",
                **planning,
                "replan": {"intervalS": 10, **planning.get("replan", {})},
            },
            "gateway": {"replicas": 2},
        },
    }
    return yaml.safe_dump(document)


@pytest.fixture(scope="module")
def watching(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster with an operator that looks at traffic every second."""
    with installation(cluster, "--set", "operator.args={--watch-interval=1}"):
        yield cluster


@pytest.fixture
def started(watching: Cluster, namespace: str):
    """Brings up the deployment `chat`; deleted afterwards."""
    found = Chat(watching, namespace)

    def start(text: str) -> Chat:
        watching.kubectl("apply", "-n", namespace, "-f", "-", input=text)
        found.until_ready()
        return found

    yield start
    watching.kubectl("delete", "llmd", "--all", "-n", namespace, timeout_s=180)


def counts(chat: Chat) -> dict[str, int]:
    """Instances of the plan in force, by role."""
    return {pool["role"]: pool["replicas"] for pool in chat.deployment["status"]["plan"]["pools"]}


def verdicts(chat: Chat) -> list[str]:
    """What came of the last looks, the latest first."""
    return [each["verdict"] for each in chat.deployment["status"].get("plans", [])]


def until(chat: Chat, what: str, condition: Any) -> None:
    try:
        wait_until(condition, PATIENCE_S, what)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{told(chat.cluster, chat.namespace)}") from error


def test_the_plan_follows_the_traffic_and_no_request_fails(started) -> None:
    chat = started(manifest(CODE, {}))
    before = counts(chat)
    with Stream(chat.address, "chat", CODE) as stream:
        until(chat, "it is compared", lambda: condition(chat.deployment, "PredictionHolds"))
        stream.kind = CONVERSATION
        until(chat, "another plan is applied", lambda: "Applied" in verdicts(chat))
        until(chat, "it is carried out", chat.is_ready)
        answered = stream.answered
        until(chat, "it serves", lambda: stream.answered > answered + 50)
    assert stream.failures == []
    assert counts(chat) != before
    assert "traffic" in chat.cluster.kubectl("get", "events", "-n", chat.namespace)
