"""Plans that follow traffic: a real control plane, emulated engines behind real gateways."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest
import yaml

from cleave.manifests.labels import ENGINE_PORT, GATEWAY_PORT
from cleave.rpc.engine_key import ENV, build_headers

from e2e.cluster.cluster import Cluster, wait_until
from e2e.cluster.open_loop_load import Kind, Stream
from e2e.test_cluster_operator import (
    OPEN_WORKERS,
    READY_S,
    Chat,
    condition,
    installation,
    read_log,
)

pytestmark = pytest.mark.timeout(900)

CODE = Kind(rate=8, prompt_tokens=500, output_tokens=16)
CONVERSATION = Kind(rate=16, prompt_tokens=400, output_tokens=40)


def manifest(
    kind: Kind,
    engine: dict[str, Any],
    slo: dict[str, float] | None = None,
    pools: dict[str, Any] | None = None,
    **planning: Any,
) -> str:
    """A deployment that is planned for a kind of traffic, and looked at every ten seconds."""

    def lengths(mean: float) -> dict[str, float]:
        return {"mean": mean, "p90": mean * 1.67}

    document = {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "chat"},
        "spec": {
            "model": {"source": "facebook/opt-13b", "servedName": "chat", "maxModelLen": 2048},
            "pools": pools or {},
            "slo": slo or {"ttftMs": 400, "tpotMs": 40},
            "engine": {"type": "Emulated", "emulated": {"timeScale": 1.0}, **engine},
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
        },
    }
    return yaml.safe_dump(document)


@pytest.fixture(scope="module")
def watching(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster with an operator that looks at traffic every second."""
    with installation(cluster, "--set", "operator.args={--watch-interval=1}"):
        yield cluster


@contextmanager
def started(cluster: Cluster, text: str, namespace: str = "") -> Iterator[Chat]:
    """The deployment `chat` in a namespace of its own, ready; deleted afterwards."""
    namespace = namespace or f"test-replan-{secrets.token_hex(4)}"
    cluster.kubectl("create", "namespace", namespace)
    cluster.apply(OPEN_WORKERS, namespace=namespace)
    try:
        cluster.kubectl("apply", "-n", namespace, "-f", "-", input=text)
        chat = Chat(cluster, namespace)
        chat.until_ready()
        yield chat
    finally:
        cluster.kubectl("delete", "llmd", "--all", "-n", namespace, timeout_s=180)
        cluster.kubectl("delete", "namespace", namespace, "--wait=false")


@dataclass(frozen=True)
class Served:
    """A deployment under load."""

    chat: Chat
    stream: Stream
    before: dict[str, int]
    """Instances of its first plan."""


@pytest.fixture(scope="module", autouse=True)
def slow(watching: Cluster) -> Iterator[Served]:
    """Engines that are half as fast as they are planned to be; served beside all other tests."""
    # Flipped instances would show less of how long passes take.
    text = manifest(
        *(CODE, {"args": ["--fault-injection"]}, {"ttftMs": 750, "tpotMs": 100}),
        *({"flipping": "Off"},),
        replan={"mode": "Off"},
    )
    with started(watching, text) as chat:
        slow_down(chat, 2.0)
        with Stream(chat.address, "chat", CODE) as stream:
            until(chat, "the load is on", lambda: stream.answered > 20)
            before = counts(chat)
            chat.edit({"planning": {"replan": {"mode": "Auto"}}})
            yield Served(chat, stream, before)


def counts(chat: Chat) -> dict[str, int]:
    """Instances of the plan in force, by role."""
    return {pool["role"]: pool["replicas"] for pool in chat.deployment["status"]["plan"]["pools"]}


def planned_threshold(chat: Chat) -> int:
    """Prompt tokens below which decode instances may compute prompts, by the plan in force."""
    return int(chat.deployment["status"]["plan"].get("wholeBelowTokens", 0))


def apply_threshold(chat: Chat) -> bool:
    """Whether every gateway applies the plan's threshold, as its page says."""
    expected = 'cleave_gateway_plan_threshold_tokens{threshold="short_prompt"} '
    found = set()
    for pod in list_gateways(chat):
        address = f"http://{pod['status']['podIP']}:{GATEWAY_PORT}/metrics"
        lines = httpx.get(address, timeout=10).text.splitlines()
        (line,) = (each for each in lines if each.startswith(expected))
        found.add(float(line.removeprefix(expected)))
    return found == {planned_threshold(chat)}


def list_gateways(chat: Chat) -> list[dict[str, Any]]:
    """The pods of the gateway."""
    return chat.cluster.list("pods", chat.namespace, "cleave.dev/component=gateway")


def find_starts(chat: Chat) -> set[tuple[str, int]]:
    """Uid and restarts of each gateway's pod."""
    return {
        (pod["metadata"]["uid"], pod["status"]["containerStatuses"][0]["restartCount"])
        for pod in list_gateways(chat)
    }


def verdicts(chat: Chat) -> list[str]:
    """What came of the last looks, the latest first."""
    return [each["verdict"] for each in chat.deployment["status"].get("plans", [])]


def slow_down(chat: Chat, factor: float) -> None:
    """Make all engines that there are now slower."""
    for pod in chat.workers():
        address = pod["status"]["podIP"]
        faults, headers = f"http://{address}:{ENGINE_PORT}/emulator/faults", find_key(address)
        httpx.post(faults, json={"slow": factor}, headers=headers, timeout=10).raise_for_status()


def find_key(address: str) -> dict[str, str]:
    """The header with the key of the engine at an address, read from its process."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if address in words and "cleave_worker.emulator.main" in words:
            return build_headers(process.environ().get(ENV, ""))
    raise LookupError(f"no engine at {address}")


def until(chat: Chat, what: str, condition: Any) -> None:
    try:
        wait_until(condition, READY_S, what)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{read_log(chat.cluster, chat.namespace)}") from error


def test_advice_follows_the_traffic_and_then_the_plan_does_without_a_failed_request(
    watching: Cluster,
) -> None:
    with started(watching, manifest(CODE, {}, replan={"mode": "Advisory"})) as chat:
        before, starts = counts(chat), find_starts(chat)
        assert planned_threshold(chat) > 0
        until(chat, "gateways apply the plan's threshold", lambda: apply_threshold(chat))
        with Stream(chat.address, "chat", CONVERSATION) as stream:
            until(chat, "another plan is proposed", lambda: "Proposed" in verdicts(chat))
            assert condition(chat.deployment, "PlanDrifted") == "True"
            assert counts(chat) == before
            chat.edit({"planning": {"replan": {"mode": "Auto"}}})
            until(chat, "another plan is applied", lambda: "Applied" in verdicts(chat))
            until(chat, "it is carried out", chat.is_ready)
            answered = stream.answered
            until(chat, "it serves", lambda: stream.answered > answered + 50)
        assert stream.failures == []
        assert counts(chat)["prefill"] > before["prefill"]
        until(chat, "gateways apply the new plan's threshold", lambda: apply_threshold(chat))
        assert find_starts(chat) == starts, "another plan starts no gateway again"
        events = chat.cluster.kubectl("get", "events", "-n", chat.namespace)
        for reason in ("PlanDrifted", "PlanProposed", "Replanned"):
            assert reason in events


def test_a_wrong_latency_profile_is_corrected_before_planning(slow: Served) -> None:
    chat = slow.chat
    until(chat, "another plan is applied", lambda: "Applied" in verdicts(chat))
    until(chat, "it is carried out", chat.is_ready)
    assert slow.before == {"prefill": 1, "decode": 1}
    assert counts(chat)["prefill"] >= 2
    # The oldest first: nothing was changed before the model was right.
    assert verdicts(chat)[::-1][:2] == ["Corrected", "Applied"], read_log(
        chat.cluster, chat.namespace
    )
    correction = chat.deployment["status"]["basis"]["correction"]
    assert 1.4 < correction["prefill"] < 10, correction
    assert 1.4 < correction["decode"] < 10, correction
    assert slow.stream.failures == []
