"""Instances come, go and change pools on a real control plane, and no request fails."""

import time
from collections.abc import Iterator

import grpc
import pytest

from cleave.manifests.labels import AGENT_PORT
from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc

from e2e.cluster import tools
from e2e.cluster.closed_loop_load import Load
from e2e.cluster.cluster import Cluster, wait_until
from e2e.test_cluster_operator import (
    READY_S,
    Chat,
    chat,
    condition,
    installation,
    placement,
    read_log,
)

__all__ = ["chat"]

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def installed(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster with an operator that looks at traffic often."""
    often = 'operator.args=["--watch-interval", "2"]'
    with installation(cluster, "--set-json", often):
        yield cluster


PLANNED = """
apiVersion: cleave.dev/v1alpha1
kind: LLMDeployment
metadata: {name: chat}
spec:
  model: {source: facebook/opt-13b, servedName: chat, maxModelLen: 2048}
  slo: {ttftMs: 1000, tpotMs: 100}
  workload: {rate: 0.2, promptTokens: {mean: 1000}, outputTokens: {mean: 300}}
  engine: {type: Emulated}
  planning: {disaggregation: Never, maxGPUs: 4, replan: {mode: "Off"}}
  scaling:
    roles: [{role: mixed, maxReplicas: 3}]
    calmS: 20
"""
"""One instance is enough, and a few requests a second are too many for it."""


@pytest.mark.parametrize("expected_replicas", [{"prefill": 2, "decode": 1}, {"mixed": 3}])
def test_instances_change_pools_under_load_without_a_restart(
    chat: Chat, expected_replicas: dict[str, int]
) -> None:
    chat.open_workers()
    before = lives(chat)
    with Load(chat.address, "chat") as load:
        wait_until(lambda: load.answered > 20, 60, "the load is on")
        chat.edit({"placement": {"manual": placement(**expected_replicas)}})
        try:
            wait_until(
                lambda: homes(chat) == expected_replicas and chat.is_ready(), READY_S, "all moved"
            )
        except AssertionError as error:
            raise AssertionError(f"{error}\n{read_log(chat.cluster, chat.namespace)}") from error
        after = load.answered
        wait_until(lambda: load.answered > after + 20, 60, "it goes on")
    assert load.failures == []
    assert lives(chat) == before, "the same pods, and the same lives of their engines"
    assert all(len(chat.workers(role)) == count for role, count in expected_replicas.items())
    events = chat.cluster.kubectl("get", "events", "-n", chat.namespace)
    assert "Repurposed" in events
    assert "without a restart" in events


def counts(chat: Chat) -> list[int]:
    """Prefill and decode instances, by the labels of their pods."""
    return [len(chat.workers(role)) for role in ("prefill", "decode")]


def lives(chat: Chat) -> dict[str, str]:
    """Boot ids by pod."""
    return {pod["metadata"]["uid"]: registration(chat, pod).boot_id for pod in chat.workers()}


def homes(chat: Chat) -> dict[str, int]:
    """Instances by what their agents take for their own role."""
    found: dict[str, int] = {}
    for pod in chat.workers():
        name = agent_pb2.Role.Name(registration(chat, pod).home).removeprefix("ROLE_").lower()
        found[name] = found.get(name, 0) + 1
    return found


def registration(chat: Chat, pod: dict) -> agent_pb2.Registration:
    """What the agent of a pod says of itself."""
    with grpc.insecure_channel(f"{pod['status']['podIP']}:{AGENT_PORT}") as channel:
        own = chat.sign_call(pod)
        stub = agent_pb2_grpc.AgentStub(channel)
        return stub.Health(agent_pb2.HealthRequest(), timeout=10, metadata=own).registration


def test_all_instances_go_without_requests_and_the_first_one_brings_them_back(chat: Chat) -> None:
    chat.edit({"scaling": {"idleS": 10, "wakeTimeoutS": 120}})
    try:
        wait_until(lambda: not chat.workers() and chat.is_ready(), 180, "all are gone")
        wait_until(lambda: gateways_ready(chat) == 2, 180, "gateways that hold requests are ready")
        assert condition(chat.deployment, "Ready") == "True"
        began = time.monotonic()
        assert chat.ask(timeout_s=150) == "", "the first request is answered"
        print(f"the first request took {time.monotonic() - began:.1f} s")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{read_log(chat.cluster, chat.namespace)}") from error
    assert counts(chat) == [1, 2]
    events = chat.cluster.kubectl("get", "events", "-n", chat.namespace)
    assert "prefill 1 -> 0, decode 2 -> 0" in events
    assert "prefill 0 -> 1, decode 0 -> 2" in events


def gateways_ready(chat: Chat) -> int:
    """Gateways that are ready, as they should be now."""
    found = chat.cluster.get("deployment", "chat-gateway", chat.namespace) or {}
    status = found.get("status", {})
    is_reported = status.get("observedGeneration") == found["metadata"]["generation"]
    return (
        min(status.get("readyReplicas", 0), status.get("updatedReplicas", 0)) if is_reported else 0
    )


def test_a_horizontal_pod_autoscaler_owns_a_pool_that_is_given_to_it(chat: Chat) -> None:
    pool = ("ipool/chat-decode", "-n", chat.namespace)
    chat.cluster.kubectl("patch", *pool, "--type=merge", "-p", '{"spec":{"owner":"Autoscaler"}}')
    chat.cluster.kubectl("scale", *pool, "--replicas=1")
    wait_until(lambda: counts(chat) == [1, 1], 180, "it is scaled by hand")
    example = tools.REPOSITORY / "examples" / "autoscaling" / "hpa.yaml"
    chat.cluster.kubectl("apply", "-n", chat.namespace, "-f", str(example))
    # Without a metrics adapter an autoscaler keeps its bounds, by way of the pool's /scale.
    wait_until(lambda: counts(chat) == [1, 2] and chat.is_ready(), 120, "it has its least number")
    found = chat.cluster.get("hpa", "chat-decode", chat.namespace) or {}
    assert condition(found, "AbleToScale") == "True"
    events = chat.cluster.kubectl("get", "events", "-n", chat.namespace)
    assert "ReplicasSetBack" not in events


def test_instances_follow_the_rate_and_no_request_fails(installed: Cluster, namespace: str) -> None:
    chat = Chat(installed, namespace)
    installed.kubectl("apply", "-n", namespace, "-f", "-", input=PLANNED)
    try:
        chat.until_ready()
        assert len(chat.workers("mixed")) == 1
        with Load(chat.address, "chat", users=4, tokens=8) as load:
            wait_until(lambda: len(chat.workers("mixed")) == 3, 120, "more come with the load")
            wait_until(chat.is_ready, READY_S, "they are ready")
        assert load.failures == []
    except AssertionError as error:
        raise AssertionError(f"{error}\n{read_log(installed, namespace)}") from error
    finally:
        installed.kubectl("delete", "llmd", "--all", "-n", namespace, timeout_s=180)
