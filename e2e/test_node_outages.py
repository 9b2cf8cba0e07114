"""Outages of whole parts of a cluster with real nodes: nodes, DNS, API server, CPU time.

As e2e/test_node_faults.py: `make e2e-node NODE_TESTS=e2e/test_node_outages.py ARGS=-s`.
"""

import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from e2e.cluster.cluster import Cluster, wait_until
from e2e.cluster.control_plane import NODE_LOST_S, ControlPlane
from e2e.real_nodes.fault_report import FaultReport, Observation
from e2e.real_nodes.network import connect_node, disconnect_node
from e2e.real_nodes.processes import kill_node, limited_cpu, slow_disk
from e2e.real_nodes.real_cluster import NODES, start_node
from e2e.real_nodes.sandbox import FOLDER_VARIABLE
from e2e.test_cluster_operator import CHAT, Chat, condition, installed
from e2e.test_node_faults import (
    FRONT,
    SEEN_S,
    WORKER,
    chat,
    delete,
    deployed,
    has_ended,
    pick_serving,
    report,
)

__all__ = ["chat", "deployed", "installed", "report"]

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(FOLDER_VARIABLE not in os.environ, reason="run `make e2e-node`"),
]

LOST = NODES[1]
"""Clients reach Services through the other one."""
OUTAGE_S = 30
SLOW_START_S = 180
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")


@pytest.fixture
def control_plane(chat: Chat) -> ControlPlane:
    assert chat.cluster.control_plane is not None
    return chat.cluster.control_plane


def on_node(chat: Chat, node: str) -> list[dict]:
    pods = chat.cluster.list("pods", chat.namespace)
    return [pod for pod in pods if pod["spec"].get("nodeName") == node]


def is_node_ready(chat: Chat, node: str) -> bool:
    return condition(chat.cluster.get("nodes", node) or {}, "Ready") == "True"


def check_that_failures_end(seen: Observation, chat: Chat) -> None:
    """Until Kubernetes knows that a node is lost, half of all new connections go there, and wait
    until their client gives up. None that begins afterwards fails."""
    known_s = time.time() + 1
    time.sleep(10)
    ages_s = {each: float(each.split()[1]) - known_s for each in seen.failures}
    assert {failure: age_s for failure, age_s in ages_s.items() if age_s > 0} == {}
    assert chat.ask() == ""


def test_a_drained_node(chat: Chat, report: FaultReport) -> None:
    leaving = {pod["metadata"]["uid"] for pod in on_node(chat, LOST)}
    with report.observe(chat, "kubectl drain of a node with half of all pods") as seen:
        try:
            flags = ("--delete-emptydir-data", "--ignore-daemonsets", "--timeout=120s")
            chat.cluster.kubectl("drain", LOST, *flags, timeout_s=130)
            assert not leaving & {pod["metadata"]["uid"] for pod in on_node(chat, LOST)}
        finally:
            chat.cluster.kubectl("uncordon", LOST)
    assert seen.failures == []
    spread(chat)


def spread(chat: Chat) -> None:
    """Replace pods until each node has a worker of each role and a gateway again."""
    for component in (WORKER, FRONT):
        for _ in range(6):
            nodes = {pod["spec"].get("nodeName") for pod in component.list_pods(chat)}
            if nodes >= {*NODES}:
                break
            pod = pick_serving(component, chat)
            delete(pod, chat)
            wait_until(lambda gone=pod: has_ended(gone, chat), SEEN_S, "it is replaced")
            wait_until(lambda: is_complete(chat), SEEN_S, "all are there")


def is_complete(chat: Chat) -> bool:
    pods = chat.cluster.list("pods", chat.namespace)
    return chat.is_ready() and all(condition(pod, "Ready") == "True" for pod in pods)


def test_a_cordoned_node(chat: Chat, report: FaultReport) -> None:
    before = {pod["metadata"]["uid"] for pod in on_node(chat, LOST)}
    with report.observe(chat, f"kubectl cordon of a node for {OUTAGE_S} s") as seen:
        chat.cluster.kubectl("cordon", LOST)
        time.sleep(OUTAGE_S)
        chat.cluster.kubectl("uncordon", LOST)
    assert seen.failures == []
    assert before == {pod["metadata"]["uid"] for pod in on_node(chat, LOST)}, "nothing moves"


def test_a_node_that_reboots(chat: Chat, report: FaultReport) -> None:
    spread(chat)
    pods = on_node(chat, LOST)
    with report.observe(chat, "a node reboots: all of its processes are killed at once") as seen:
        kill_node(LOST)
        start_node(LOST)
        for pod in pods:
            wait_until(lambda gone=pod: has_ended(gone, chat), 120, "each container is new")
    check_that_load_recovers(seen)


def check_that_load_recovers(seen: Observation) -> None:
    assert seen.row is not None
    kinds = Counter(each.partition(": ")[2][:60] for each in seen.failures)
    print(f"  {dict(kinds)}")
    assert seen.row.answered > len(seen.failures)


def test_a_node_that_is_cut_off(chat: Chat, report: FaultReport) -> None:
    spread(chat)
    lost = {pod["metadata"]["uid"] for pod in on_node(chat, LOST)}
    with report.observe(chat, "a node is cut off until its pods are replaced", 240) as seen:
        disconnect_node(NODES.index(LOST))
        try:
            gone = NODE_LOST_S + SEEN_S
            wait_until(lambda: not is_node_ready(chat, LOST), gone, "the node is lost")
            wait_until(
                lambda: (
                    len([p for p in on_node(chat, NODES[0]) if condition(p, "Ready") == "True"])
                    >= 6
                ),
                SEEN_S,
                "its pods are replaced",
            )
            check_that_failures_end(seen, chat)
        finally:
            connect_node(NODES.index(LOST))
        wait_until(lambda: is_node_ready(chat, LOST), SEEN_S, "the node is back")
    assert not lost & {pod["metadata"]["uid"] for pod in on_node(chat, LOST)}
    check_that_load_recovers(seen)


def test_probes_of_a_node_without_cpu_time(chat: Chat, report: FaultReport) -> None:
    """Pods of a node run a twentieth of the time for half a minute: nothing is killed for it."""
    spread(chat)
    with (
        report.observe(chat, f"pods of a node run 5 % of the time for {OUTAGE_S} s") as seen,
        limited_cpu(LOST, 0.05),
    ):
        time.sleep(OUTAGE_S)
    assert seen.row is not None
    assert "restarts" not in seen.row.left, "no probe kills what is only slow"
    assert seen.failures == []


def test_a_node_with_a_slow_disk(chat: Chat, report: FaultReport) -> None:
    """Its worker and its gateway are replaced; programs come from the disk at 2 MiB/s."""
    spread(chat)
    fault = "a worker and a gateway are replaced on a node that reads 2 MiB/s"
    with (
        report.observe(chat, fault) as seen,
        slow_disk(LOST, Path(os.environ[FOLDER_VARIABLE]), 2 << 20),
    ):
        chat.cluster.kubectl("cordon", next(node for node in NODES if node != LOST))
        try:
            for component in (WORKER, FRONT):
                pod = next(
                    pod for pod in component.list_pods(chat) if pod["spec"].get("nodeName") == LOST
                )
                delete(pod, chat)
                wait_until(lambda gone=pod: has_ended(gone, chat), SEEN_S, "it is gone")
            wait_until(lambda: is_complete(chat), SLOW_START_S, "both are replaced")
        finally:
            chat.cluster.kubectl("uncordon", next(node for node in NODES if node != LOST))
    assert seen.failures == []


def test_dns_that_is_gone(chat: Chat, report: FaultReport) -> None:
    """Pods that start meanwhile find the API server and their peers without names."""
    dns = ("deployment/coredns", "-n", "kube-system")
    with report.observe(chat, "no DNS, and a worker and a gateway are replaced meanwhile") as seen:
        chat.cluster.kubectl("scale", *dns, "--replicas=0")
        try:
            wait_until(
                lambda: not chat.cluster.list("pods", "kube-system", "k8s-app=kube-dns"),
                SEEN_S,
                "no name server is left",
            )
            for component in (WORKER, FRONT):
                pod = pick_serving(component, chat)
                delete(pod, chat)
                wait_until(lambda gone=pod: has_ended(gone, chat), SEEN_S, "it is gone")
            wait_until(lambda: is_complete(chat), SEEN_S, "both are replaced without DNS")
        finally:
            chat.cluster.kubectl("scale", *dns, "--replicas=1")
    assert seen.failures == []


def test_an_api_server_that_is_slow(
    chat: Chat, report: FaultReport, control_plane: ControlPlane
) -> None:
    """It runs a tenth of the time for half a minute; a worker is replaced meanwhile."""
    with report.observe(chat, "the API server stops for 0.9 s of each second") as seen:
        pod = pick_serving(WORKER, chat)
        delete(pod, chat)
        for _ in range(OUTAGE_S):
            control_plane.signal_api_server(signal.SIGSTOP)
            time.sleep(0.9)
            control_plane.signal_api_server(signal.SIGCONT)
            time.sleep(0.1)
        wait_until(lambda: has_ended(pod, chat), SEEN_S, "it is gone")
    assert seen.failures == []


def test_an_api_server_that_hangs(
    chat: Chat, report: FaultReport, control_plane: ControlPlane
) -> None:
    """Connections stay open and nothing is answered: the leader's Lease ends meanwhile."""
    with report.observe(chat, f"the API server hangs for {OUTAGE_S / 2:.0f} s") as seen:
        control_plane.signal_api_server(signal.SIGSTOP)
        time.sleep(OUTAGE_S / 2)
        control_plane.signal_api_server(signal.SIGCONT)
    assert seen.failures == []


def test_an_api_server_that_is_away(
    chat: Chat, report: FaultReport, control_plane: ControlPlane
) -> None:
    with report.observe(chat, "the API server and its controllers are away for 15 s") as seen:
        control_plane.kill_api_server()
        time.sleep(OUTAGE_S / 2)
        control_plane.start_api_server()
    assert seen.failures == []


@pytest.fixture
def clock(installed: Cluster, namespace: str) -> Iterator[tuple[Chat, Path]]:
    """A deployment whose workers take the time from a file: an offset such as `+600`."""
    if not FAKETIME.exists():
        pytest.skip("needs the Debian package libfaketime")
    folder = Path(os.environ[FOLDER_VARIABLE]) / "clock"
    folder.mkdir()
    shutil.copy(FAKETIME, folder)
    file = folder / "offset"
    file.write_text("+0")
    folder.chmod(0o755)
    env = {
        "LD_PRELOAD": f"/clock/{FAKETIME.name}",
        "FAKETIME_TIMESTAMP_FILE": "/clock/offset",
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    manifest = yaml.safe_load(CHAT)
    manifest["spec"]["engine"]["env"] = [{"name": k, "value": v} for k, v in env.items()]
    manifest["spec"]["template"] = {
        "volumes": [{"name": "clock", "hostPath": {"path": str(folder)}}],
        "volumeMounts": [{"name": "clock", "mountPath": "/clock", "readOnly": True}],
    }
    installed.apply(manifest, namespace=namespace)
    try:
        chat = Chat(installed, namespace)
        chat.until_ready()
        yield chat, file
    finally:
        installed.kubectl("delete", "llmd", "--all", "-n", namespace, timeout_s=180)
        shutil.rmtree(folder)


@pytest.mark.parametrize("offset", ["+600", "-600"])
def test_clocks_of_workers_that_jump(
    clock: tuple[Chat, Path], report: FaultReport, offset: str
) -> None:
    chat, file = clock
    with report.observe(chat, f"the clocks of all workers jump by {offset} s and back") as seen:
        file.write_text(offset)
        pod = chat.workers("decode")[0]["metadata"]["name"]
        read = (
            "exec",
            pod,
            "-n",
            chat.namespace,
            "--",
            "python",
            "-c",
            "import time; print(time.time())",
        )
        ahead_s = float(chat.cluster.kubectl(*read)) - time.time()
        assert abs(ahead_s - float(offset)) < SEEN_S, "the clock has jumped"
        time.sleep(OUTAGE_S / 2)
        file.write_text("+0")
    assert seen.failures == []
