"""What only real nodes show (`make e2e-node`): pods are containers of this checkout's images."""

import json
import os
import re
import shlex
import subprocess
import time
import urllib.request
from collections.abc import Iterator

import pytest
import yaml

from e2e.cluster import tools
from e2e.cluster.cluster import WITHOUT_GUARD, Cluster, CommandError, wait_until
from e2e.real_nodes.sandbox import FOLDER_VARIABLE
from e2e.test_cluster_operator import CHAT, SYSTEM, Chat, chat, condition, installed, read_log

__all__ = ["chat", "installed"]

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(FOLDER_VARIABLE not in os.environ, reason="run `make e2e-node`"),
]

EARLY_END_S = 20
"""From the deletion of a pod that starts to its end; its grace period is ten minutes."""


def test_readmes_lines_install_serve_and_uninstall(cluster: Cluster) -> None:
    lines = read_install_lines()
    assert "scripts/images" in lines[0]
    forward = next(line for line in lines if "port-forward" in line)
    try:
        for line in lines[1:]:
            if line == forward:
                with forwarded(cluster, line):
                    assert ask("http://127.0.0.1:8080")["choices"]
            else:
                type_line(cluster, line)
    finally:
        cluster.helm("uninstall", "cleave", "-n", SYSTEM, *WITHOUT_GUARD)
    # Kubernetes collects what belonged to the deployment, and gateways leave in their own time.
    wait_until(lambda: not cluster.list("pods", "default"), 60, "no pod is left")


def read_install_lines() -> list[str]:
    """Commands of README's section on clusters, comments removed."""
    text = (tools.REPOSITORY / "README.md").read_text()
    block = text.split("## Install on a cluster", 1)[1].split("```")[1]
    return [re.sub(r"\s+#.*", "", line) for line in block.strip().splitlines()]


def type_line(cluster: Cluster, line: str) -> None:
    done = subprocess.run(
        line, shell=True, cwd=tools.REPOSITORY, env=build_env(cluster), capture_output=True,
        text=True, timeout=360, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{line}\n{done.stderr}\n{read_log(cluster, 'default')}"


def build_env(cluster: Cluster) -> dict[str, str]:
    path = f"{cluster.programs}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "KUBECONFIG": str(cluster.kubeconfig)}


class forwarded:  # noqa: N801 - reads as a function
    """`kubectl port-forward` while the block lasts."""

    def __init__(self, cluster: Cluster, line: str) -> None:
        self._process = subprocess.Popen(
            shlex.split(line), env=build_env(cluster), stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> None:
        assert self._process.stdout is not None
        assert "Forwarding" in self._process.stdout.readline()

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()


def ask(url: str, model: str = "facebook/opt-13b") -> dict:
    question = {
        "model": model,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 8,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(question).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def test_a_chat_is_answered_over_the_service(chat: Chat) -> None:
    service = chat.cluster.get("service", "chat", chat.namespace)
    assert chat.address == f"{service['spec']['clusterIP']}:80"
    assert chat.ask() == ""


@pytest.mark.parametrize(
    ("target", "page"),
    [("deployment/chat-gateway", "/health"), ("service/chat", "/v1/models")],
)
def test_gateways_answer_through_port_forward(chat: Chat, target: str, page: str) -> None:
    port = "8080" if target.startswith("deployment") else "80"
    line = f"kubectl port-forward -n {chat.namespace} {target} 18080:{port}"
    with (
        forwarded(chat.cluster, line),
        urllib.request.urlopen(f"http://127.0.0.1:18080{page}", timeout=30) as answer,
    ):
        assert answer.status == 200


def test_the_operators_metrics_are_read_through_port_forward(installed: Cluster) -> None:
    line = f"kubectl port-forward -n {SYSTEM} deployment/cleave-operator 18081:8081"
    with (
        forwarded(installed, line),
        urllib.request.urlopen("http://127.0.0.1:18081/metrics", timeout=30) as answer,
    ):
        assert b"cleave_" in answer.read()


def test_containers_have_logs_a_shell_and_a_root_that_is_read_only(chat: Chat) -> None:
    gateway = ("-n", chat.namespace, "deployment/chat-gateway")
    first = chat.cluster.kubectl("logs", *gateway).splitlines()[0]
    assert json.loads(first)["level"]
    inside = ("exec", *gateway, "--", "sh", "-c")
    python = "exec python -c 'import os; print(os.getuid(), os.getgid())'"
    assert chat.cluster.kubectl(*inside, python).split() == ["1000", "1000"]
    with pytest.raises(CommandError, match="Read-only file system"):
        chat.cluster.kubectl(*inside, "echo > /etc/new")
    chat.cluster.kubectl(*inside, "echo > /tmp/new")


def test_a_worker_that_is_deleted_while_it_starts_ends_at_once(
    installed: Cluster, namespace: str
) -> None:
    installed.kubectl("apply", "-n", namespace, "-f", "-", input=CHAT)
    try:
        pod = wait_until(lambda: find_started(installed, namespace), 60, "a worker starts")
        begun = time.monotonic()
        installed.kubectl("delete", "pod", pod, "-n", namespace, f"--timeout={EARLY_END_S}s")
        print(f"gone after {time.monotonic() - begun:.1f} s")
    finally:
        installed.kubectl("delete", "llmd", "--all", "-n", namespace, timeout_s=180)


def find_started(cluster: Cluster, namespace: str) -> str:
    """A worker whose container runs and is not ready yet."""
    for pod in cluster.list("pods", namespace, "cleave.dev/component=worker"):
        for container in pod["status"].get("containerStatuses", []):
            if "running" in container["state"] and not container["ready"]:
                return pod["metadata"]["name"]
    return ""


def test_pod_security_restricted_admits_everything(installed: Cluster, namespace: str) -> None:
    level = "pod-security.kubernetes.io/enforce=restricted"
    installed.kubectl("label", "namespace", namespace, level)
    installed.kubectl("apply", "-n", namespace, "-f", "-", input=CHAT)
    try:
        Chat(installed, namespace).until_ready()
        assert Chat(installed, namespace).ask() == ""
    finally:
        installed.kubectl("delete", "llmd", "--all", "-n", namespace, timeout_s=180)


@pytest.fixture
def starved(installed: Cluster, namespace: str) -> Iterator[Chat]:
    """A deployment whose workers have too little memory to start."""
    manifest = yaml.safe_load(CHAT)
    manifest["spec"]["template"] = {"resources": {"limits": {"memory": "24Mi"}}}
    installed.apply(manifest, namespace=namespace)
    yield Chat(installed, namespace)
    installed.kubectl("delete", "llmd", "--all", "-n", namespace, timeout_s=180)


def test_a_worker_beyond_its_memory_is_killed_and_more_memory_mends_it(starved: Chat) -> None:
    def is_killed() -> bool:
        containers = [
            each for pod in starved.workers() for each in pod["status"].get("containerStatuses", [])
        ]
        ends = [
            state["terminated"]
            for each in containers
            for state in (each["state"], each["lastState"])
            if "terminated" in state
        ]
        return any(end["reason"] == "OOMKilled" for end in ends)

    wait_until(is_killed, 90, "a worker is killed for want of memory")
    assert condition(starved.deployment, "Ready") != "True"
    starved.edit({"template": {"resources": {"limits": {"memory": "1Gi"}}}})
    starved.until_ready(180)
    assert starved.ask() == ""
