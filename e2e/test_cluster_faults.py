"""Parts of a real cluster fail while clients are served: what they may notice of it."""

import time

import pytest

from e2e.cluster.closed_loop_load import Load
from e2e.cluster.cluster import Cluster, wait_until
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.nodes import Nodes
from e2e.cluster.services import endpoints
from e2e.test_cluster_operator import (
    READY_S,
    Chat,
    chat,
    condition,
    installed,
    message,
    nodes,
    placement,
)

__all__ = ["chat", "installed", "nodes"]

pytestmark = pytest.mark.timeout(900)

AWAY_S = 10


@pytest.fixture
def control_plane(installed: Cluster) -> ControlPlane:
    if installed.control_plane is None:
        pytest.skip("needs a control plane that a test may break")
    return installed.control_plane


def gateways(chat: Chat) -> list[dict]:
    """Gateway pods that are meant to stay."""
    pods = chat.cluster.list("pods", chat.namespace, "cleave.dev/component=gateway")
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def names(pods: list[dict]) -> set[str]:
    return {pod["metadata"]["name"] for pod in pods}


def test_requests_go_on_while_the_api_server_is_away(
    chat: Chat,
    control_plane: ControlPlane,
) -> None:
    with Load(chat.address, "chat") as load:
        wait_until(lambda: load.answered > 20, 120, "the load is on")
        control_plane.kill_api_server()
        time.sleep(AWAY_S)
        during = load.answered
        control_plane.start_api_server()
        wait_until(lambda: load.answered > during + 20, 120, "answers after its return")
    assert load.failures == []
    chat.cluster.kubectl("scale", "llmd/chat", "--replicas=3", "-n", chat.namespace)
    wait_until(
        lambda: chat.is_ready() and len(ready(gateways(chat))) == 3,
        READY_S,
        "the operator has found its way back",
    )


def test_a_gateway_that_is_deleted_loses_no_request(chat: Chat) -> None:
    before = names(gateways(chat))
    assert len(before) >= 2
    with Load(chat.address, "chat") as load:
        wait_until(lambda: load.answered > 20, 120, "the load is on")
        for name in sorted(before):
            chat.cluster.kubectl("delete", "pod", name, "-n", chat.namespace, "--wait=false")
            wait_until(lambda: len(ready(gateways(chat))) >= 2, READY_S, "another one is ready")
        after = load.answered
        wait_until(lambda: load.answered > after + 20, 120, "the new ones answer")
    assert load.failures == []


def test_workers_that_are_deleted_one_by_one_lose_no_request(chat: Chat) -> None:
    # A real pod takes seconds to start, longer than requests wait for the only prefill instance.
    before = names(chat.workers("decode" if chat.cluster.nodes is None else ""))
    with Load(chat.address, "chat") as load:
        wait_until(lambda: load.answered > 20, 120, "the load is on")
        for name in sorted(before):
            chat.cluster.kubectl("delete", "pod", name, "-n", chat.namespace, "--wait=false")
            wait_until(
                lambda gone=name: gone not in names(chat.workers()) and chat.is_ready(),
                READY_S,
                "another one takes its place",
            )
    assert load.failures == []


def test_a_killed_worker_is_restarted_and_the_others_serve_meanwhile(
    chat: Chat,
    nodes: Nodes,
) -> None:
    victim = chat.workers("decode")[0]["metadata"]["name"]
    with Load(chat.address, "chat", users=2) as load:
        wait_until(lambda: load.answered > 20, 120, "the load is on")
        nodes.kill(victim)
        killed = load.answered
        wait_until(lambda: load.answered > killed + 50, 120, "the others answer")
    # A stream whose engine died in its middle may break; nothing that began afterwards.
    assert len(load.failures) <= 2
    wait_until(chat.is_ready, READY_S, "it is back")


def test_a_killed_gateway_takes_its_own_requests_along_and_no_others(
    chat: Chat, nodes: Nodes
) -> None:
    """Its requests cannot finish; later ones go elsewhere until it is back."""

    def is_back() -> bool:
        found = gateways(chat)
        return chat.is_ready() and restarts(found) == 1 and len(ready(found)) >= 2

    victim = min(gateways(chat), key=lambda pod: pod["metadata"]["name"])
    with Load(chat.address, "chat") as load:
        wait_until(lambda: load.answered > 20, 120, "the load is on")
        nodes.kill(victim["metadata"]["name"])
        killed = time.monotonic()
        wait_until(
            lambda: victim["status"]["podIP"] not in find_addresses(chat) or is_back(),
            READY_S,
            "clients are sent elsewhere",
        )
        away_s = time.monotonic() - killed
        wait_until(is_back, READY_S, "it is restarted and ready")
        failed, after = len(load.failures), load.answered
        wait_until(lambda: load.answered > after + 50, 120, "both answer")
    assert len(load.failures) == failed
    print(f"{failed} failures, sent elsewhere after {away_s:.1f} s")
    # Until then the users fail three to four times a second.
    assert failed <= 20 + 4 * away_s, "its own, and what was sent to it until it was known as gone"


def test_a_drained_node_of_the_only_instances_loses_no_request(chat: Chat) -> None:
    chat.edit({"placement": {"manual": placement(prefill=1, decode=1)}})
    chat.until_ready()
    node = chat.workers("decode")[0]["spec"]["nodeName"]
    leaving = {pod["metadata"]["uid"] for pod in chat.workers() if pod["spec"]["nodeName"] == node}
    with Load(chat.address, "chat") as load:
        wait_until(lambda: load.answered > 20, 120, "the load is on")
        try:
            begun = time.monotonic()
            drain = ("drain", node, "--delete-emptydir-data", "--ignore-daemonsets")
            chat.cluster.kubectl(*drain, "--timeout=120s", timeout_s=130)
            print(f"drained in {time.monotonic() - begun:.1f} s, {load.answered} answers")
            assert not leaving & {pod["metadata"]["uid"] for pod in chat.workers()}
            after = load.answered
            wait_until(lambda: load.answered > after + 20, 120, "the replacements answer")
        finally:
            chat.cluster.kubectl("uncordon", node)
    assert load.failures == []
    wait_until(chat.is_ready, READY_S, "everything has settled")


def test_the_kv_path_is_reported_as_measured(chat: Chat) -> None:
    wait_until(
        lambda: condition(chat.deployment, "KVPathVerified") == "True", 120, "it is verified"
    )
    reported = message(chat.deployment, "KVPathVerified")
    assert reported.startswith("emulated, ")
    assert "GB/s" in reported


def find_addresses(chat: Chat) -> set[str]:
    """Of the gateways to which new connections go."""
    label = "kubernetes.io/service-name=chat"
    found = endpoints(chat.cluster.list("endpointslices", chat.namespace, label), "http")
    return {address for address, _ in found}


def ready(pods: list[dict]) -> list[dict]:
    return [pod for pod in pods if _is_ready(pod)]


def restarts(pods: list[dict]) -> int:
    containers = [each for pod in pods for each in pod["status"]["containerStatuses"]]
    return sum(each["restartCount"] for each in containers)


def _is_ready(pod: dict) -> bool:
    return condition(pod, "Ready") == "True"
