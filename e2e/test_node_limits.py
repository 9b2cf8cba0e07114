"""What administrators limit in namespaces of a cluster with real nodes, and what users see of it.

`make e2e-node NODE_TESTS=e2e/test_node_limits.py ARGS=-s`.
"""

import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import yaml

from e2e.cluster.closed_loop_load import Load
from e2e.cluster.cluster import Cluster, CommandError, wait_until
from e2e.real_nodes.real_cluster import NODES
from e2e.real_nodes.sandbox import FOLDER_VARIABLE
from e2e.test_cluster_operator import CHAT, Chat, condition, installed, message

__all__ = ["installed"]

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(FOLDER_VARIABLE not in os.environ, reason="run `make e2e-node`"),
]

SEEN_S = 60
READY_S = 120


@contextmanager
def deployed(cluster: Cluster, namespace: str, **spec: object) -> Iterator[Chat]:
    """CHAT, with other fields of its spec."""
    manifest = yaml.safe_load(CHAT)
    manifest["spec"] |= spec
    cluster.kubectl("apply", "-n", namespace, "-f", "-", input=yaml.safe_dump(manifest))
    try:
        yield Chat(cluster, namespace)
    finally:
        cluster.kubectl("delete", "llmd", "--all", "-n", namespace, timeout_s=180)


def limit_range(**limits: dict[str, str]) -> dict:
    return {
        "apiVersion": "v1",
        "kind": "LimitRange",
        "metadata": {"name": "limits"},
        "spec": {"limits": [{"type": "Container", **limits}]},
    }


def quota(**hard: str) -> dict:
    return {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "most"},
        "spec": {"hard": hard},
    }


def until_degraded(chat: Chat, text: str) -> str:
    """The message of Degraded, once it contains `text`."""
    wait_until(lambda: text in message(chat.deployment, "Degraded"), SEEN_S, f"{text} is reported")
    found = message(chat.deployment, "Degraded")
    print(f"  Degraded: {found}")
    return found


def test_a_quota_that_is_too_small_is_named_and_a_larger_one_suffices(
    installed: Cluster, namespace: str
) -> None:
    installed.apply(quota(pods="4"), namespace=namespace)
    with deployed(installed, namespace) as chat:
        assert "most" in until_degraded(chat, "exceeded quota")
        assert condition(chat.deployment, "Ready") != "True"
        begun = time.monotonic()
        installed.apply(quota(pods="20"), namespace=namespace)
        chat.until_ready(READY_S)
        print(f"  ready {time.monotonic() - begun:.0f} s after the quota was raised")
        assert chat.ask() == ""


def test_a_limit_range_below_a_workers_memory_is_named(installed: Cluster, namespace: str) -> None:
    installed.apply(limit_range(max={"memory": "256Mi"}), namespace=namespace)
    with deployed(installed, namespace) as chat:
        until_degraded(chat, "maximum memory usage per Container is 256Mi, but limit is 512Mi")


def test_defaults_of_a_limit_range_apply_and_do_no_harm(installed: Cluster, namespace: str) -> None:
    defaults = {"cpu": "1", "memory": "600Mi"}
    manifest = limit_range(default=defaults, defaultRequest={"cpu": "10m", "memory": "64Mi"})
    installed.apply(manifest, namespace=namespace)
    with deployed(installed, namespace) as chat:
        chat.until_ready(READY_S)
        (container,) = chat.workers("decode")[0]["spec"]["containers"]
        assert container["resources"]["limits"] == {"cpu": "1", "memory": "512Mi"}
        names = {pod["metadata"]["name"] for pod in chat.workers()}
        time.sleep(5)
        assert names == {pod["metadata"]["name"] for pod in chat.workers()}, "none is replaced"
        assert chat.ask() == ""


def test_the_overhead_of_a_runtime_class_is_no_drift(installed: Cluster, namespace: str) -> None:
    """The API server adds it to the pods; the operator does not replace them for it."""
    overhead = {"podFixed": {"cpu": "50m", "memory": "64Mi"}}
    runtime = {
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": "heavier"},
        "handler": "runc",
        "overhead": overhead,
    }
    installed.apply(runtime)
    try:
        with deployed(installed, namespace, template={"runtimeClassName": "heavier"}) as chat:
            chat.until_ready(READY_S)
            assert chat.ask() == ""
            pods = {pod["metadata"]["uid"] for pod in chat.workers()}
            assert {json.dumps(pod["spec"]["overhead"]) for pod in chat.workers()} == {
                json.dumps(overhead["podFixed"])
            }
            chat.edit({"pools": {"flipping": "Off"}})
            wait_until(lambda: chat.is_ready(), SEEN_S, "the edit is reconciled")
            assert {pod["metadata"]["uid"] for pod in chat.workers()} == pods
    finally:
        installed.kubectl("delete", "runtimeclass", "heavier")


def test_a_worker_with_a_core_of_its_own(installed: Cluster, namespace: str) -> None:
    """The static CPU manager of a node gives whole cores to pods of class Guaranteed."""
    core = {"cpu": "1", "memory": "512Mi"}
    template = {
        "nodeSelector": {"kubernetes.io/hostname": NODES[-1]},
        "resources": {"requests": core, "limits": core},
    }
    placement = {"manual": [{"role": "mixed", "replicas": 1}]}
    with deployed(installed, namespace, template=template, placement=placement) as chat:
        chat.until_ready(READY_S)
        assert chat.ask() == ""
        (pod,) = chat.workers()
        assert pod["status"]["qosClass"] == "Guaranteed"
        script = "import os; print(len(os.sched_getaffinity(0)))"
        shell = ("exec", pod["metadata"]["name"], "-n", namespace, "--", "python", "-c", script)
        assert installed.kubectl(*shell).strip() == "1"


def test_pod_security_baseline_admits_everything(installed: Cluster, namespace: str) -> None:
    for mode in ("enforce", "warn"):
        level = f"pod-security.kubernetes.io/{mode}=baseline"
        installed.kubectl("label", "namespace", namespace, level)
    with deployed(installed, namespace) as chat:
        chat.until_ready(READY_S)
        assert chat.ask() == ""


def test_pod_security_names_what_it_refuses(installed: Cluster, namespace: str) -> None:
    """A folder of the node is more than `restricted` allows."""
    level = "pod-security.kubernetes.io/enforce=restricted"
    installed.kubectl("label", "namespace", namespace, level)
    with deployed(installed, namespace) as chat:
        chat.until_ready(READY_S)
        chat.edit({"template": {"volumes": [{"name": "node", "hostPath": {"path": "/var"}}]}})
        until_degraded(chat, 'restricted volume types (volume "node" uses restricted volume type')
        assert chat.ask() == "", "the earlier instances serve on"


def test_users_of_two_namespaces_have_deployments_of_one_name(installed: Cluster) -> None:
    """Each with the role `edit` of one namespace only."""
    control_plane = installed.control_plane
    assert control_plane is not None
    homes = {name: f"{name}-{secrets.token_hex(4)}" for name in ("alice", "bert")}
    users = {name: control_plane.kubeconfig(name, []) for name in homes}
    for name, home in homes.items():
        installed.kubectl("create", "namespace", home)
        role = ("create", "rolebinding", name, "--clusterrole=edit", f"--user={name}", "-n", home)
        installed.kubectl(*role)
    chats = {name: Chat(installed, home) for name, home in homes.items()}
    try:
        for name, home in homes.items():
            apply = ("apply", "-n", home, "-f", "-")
            wait_until(
                lambda: installed.kubectl(*apply, input=CHAT, kubeconfig=users[name]),  # noqa: B023
                20,
                "the user may apply a deployment",
            )
        with pytest.raises(CommandError, match="cannot get resource"):
            installed.kubectl("get", "llmd", "-n", homes["bert"], "chat", kubeconfig=users["alice"])
        for chat in chats.values():
            chat.until_ready(READY_S)
        with Load(chats["bert"].address, "chat", users=2) as load:
            wait_until(lambda: load.answered > 10, 30, "the load is on")
            delete = ("delete", "llmd", "chat", "-n", homes["alice"], "--timeout=120s")
            installed.kubectl(*delete, kubeconfig=users["alice"], timeout_s=130)
            after = load.answered
            wait_until(lambda: load.answered > after + 20, 30, "the other one serves on")
        assert load.failures == []
        wait_until(lambda: not installed.list("pods", homes["alice"]), 60, "no pod is left")
        logs = ("logs", "-n", homes["bert"], "deployment/chat-gateway", "--tail=1")
        assert installed.kubectl(*logs, kubeconfig=users["bert"])
    finally:
        for home in homes.values():
            installed.kubectl("delete", "llmd", "--all", "-n", home, timeout_s=180)
            installed.kubectl("delete", "namespace", home, "--wait=false")


def test_workers_have_logs_and_a_shell(installed: Cluster, namespace: str) -> None:
    with deployed(installed, namespace) as chat:
        chat.until_ready(READY_S)
        pod = (chat.workers("decode")[0]["metadata"]["name"], "-n", namespace)
        lines = installed.kubectl("logs", *pod).splitlines()
        assert {"engine"} < {json.loads(line)["logger"] for line in lines}
        with pytest.raises(CommandError, match="Read-only file system"):
            installed.kubectl("exec", *pod, "--", "sh", "-c", "echo > /etc/new")
        assert yaml.safe_load(installed.kubectl("exec", *pod, "--", "sh", "-c", "echo $$")) > 1
