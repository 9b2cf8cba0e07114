"""vLLM on CPU in containers of real nodes, under a memory limit, prefill and decode apart.

`make e2e-node-vllm`. The containers are those of the image worker-cpu, but for the environment,
which is mounted from a folder of the nodes (scripts/node-vllm).
"""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cleave.manifests.container import get_image

from e2e.cluster import tools
from e2e.cluster.cluster import Cluster, wait_until
from e2e.real_nodes.fault_report import FaultReport, is_whole
from e2e.real_nodes.processes import find_process
from e2e.real_nodes.sandbox import FOLDER_VARIABLE
from e2e.support.deployments import start_fast
from e2e.test_cluster_operator import Chat, condition, installation, message, placement
from e2e.test_node_faults import STREAMS, has_ended

FOLDER = os.environ.get("CLEAVE_VLLM", "")
"""Folder of scripts/node-vllm."""

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(580),
    pytest.mark.skipif(
        not FOLDER or FOLDER_VARIABLE not in os.environ, reason="run `make e2e-node-vllm`"
    ),
]

START_S = 400
MODEL = "/models/tiny"
MEMORY = "4Gi"


@pytest.fixture(scope="module")
def report() -> FaultReport:
    return FaultReport(tools.REPOSITORY / "build" / "test_node_vllm.md")


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Iterator[Path]:
    """A folder that user 1000 can read, on both nodes."""
    folder = Path(os.environ[FOLDER_VARIABLE]) / "tiny"
    shutil.copytree(tiny_model, folder)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def build(model: Path, connector: str) -> dict:
    environment = {"name": "environment", "hostPath": {"path": f"{FOLDER}/environment"}}
    mount = {"name": "environment", "mountPath": "/opt/cleave", "readOnly": True}
    memory = {"memory": MEMORY}
    spec = {
        "model": {
            "source": MODEL,
            "servedName": "chat",
            "dtype": "float32",
            "maxModelLen": 4096,
            "cache": {"hostPath": {"path": str(model)}},
        },
        "slo": {"ttftMs": 1000, "tpotMs": 200},
        "engine": start_fast(image=get_image("vllm"), connector=connector),
        "template": {
            "volumes": [environment],
            "volumeMounts": [mount],
            "resources": {"requests": {"cpu": "100m", **memory}, "limits": memory},
        },
        "placement": {"manual": placement(prefill=1, decode=2)},
    }
    return {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "chat"},
        "spec": spec,
    }


@pytest.fixture(scope="module")
def installed(cluster: Cluster) -> Iterator[Cluster]:
    with installation(cluster, "--set", "workers.device=cpu"):
        yield cluster


@contextmanager
def deployed(cluster: Cluster, namespace: str, model: Path, connector: str) -> Iterator[Chat]:
    """One prefill and two decode instances, ready."""
    found = Chat(cluster, namespace)
    cluster.apply(build(model, connector), namespace=namespace)
    begun = time.monotonic()
    try:
        found.until_ready(START_S)
        print(f"\n  {connector}: ready after {time.monotonic() - begun:.0f} s")
        yield found
    finally:
        cluster.kubectl("delete", "llmd", "chat", "-n", namespace, timeout_s=120)


def check_handoffs(chat: Chat) -> None:
    assert chat.ask(tokens=12) == ""
    wait_until(
        lambda: condition(chat.deployment, "KVPathVerified") == "True",
        60,
        "the KV path is verified",
    )
    print(f"  {message(chat.deployment, 'KVPathVerified')}")


def test_nixl_hands_kv_over_between_containers(
    installed: Cluster, namespace: str, model: Path
) -> None:
    """The first test: UCX spins while it waits, and Linux 6.18 starves what shares its core."""
    with deployed(installed, namespace, model, "Nixl") as chat:
        check_handoffs(chat)


@pytest.fixture(scope="module")
def own(installed: Cluster, model: Path) -> Iterator[Chat]:
    """With Cleave's connector."""
    installed.kubectl("create", "namespace", "vllm")
    with deployed(installed, "vllm", model, "Cleave") as chat:
        yield chat
    installed.kubectl("delete", "namespace", "vllm", "--wait=false")


@pytest.fixture
def chat(own: Chat) -> Chat:
    wait_until(lambda: is_whole(own), START_S, "the last fault is over")
    return own


def test_cleaves_connector_hands_kv_over_between_containers(chat: Chat) -> None:
    check_handoffs(chat)


def test_a_killed_decode_engine(chat: Chat, report: FaultReport) -> None:
    pod = chat.workers("decode")[0]
    main = find_process(pod["metadata"]["uid"], "cleave_worker.agent.main")
    assert main is not None
    with report.observe(chat, "vLLM: SIGKILL to a decode worker that serves", START_S) as seen:
        main.signal(signal.SIGKILL)
        wait_until(lambda: has_ended(pod, chat), 60, "its container has ended")
    # Streams that are sampled cannot go on elsewhere once a client has a part of them.
    assert all('"error"' in failure for failure in seen.failures)
    assert len(seen.failures) <= STREAMS


def test_a_drained_node(chat: Chat, report: FaultReport) -> None:
    node = chat.workers("prefill")[0]["spec"]["nodeName"]
    with report.observe(chat, "vLLM: drain of the node with the only prefill", START_S) as seen:
        try:
            flags = ("--delete-emptydir-data", "--ignore-daemonsets", f"--timeout={START_S}s")
            chat.cluster.kubectl("drain", node, *flags, timeout_s=START_S + 10)
        finally:
            chat.cluster.kubectl("uncordon", node)
    assert seen.failures == []


def test_a_rollout(chat: Chat, report: FaultReport) -> None:
    before = {pod["metadata"]["uid"] for pod in chat.workers()}
    with report.observe(chat, "vLLM: rollout of all instances", START_S) as seen:
        chat.edit({"engine": start_fast(env=[{"name": "EDITED", "value": "1"}])})
        wait_until(
            lambda: not before & {pod["metadata"]["uid"] for pod in chat.workers()},
            START_S,
            "every instance is replaced",
        )
    assert seen.failures == []
