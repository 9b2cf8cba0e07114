"""The test cluster itself, and the pods that Cleave builds on it, without an operator."""

import json
import urllib.request

import grpc
import pytest

from cleave.api.engine import EngineSpec, EngineType
from cleave.api.pool import InstancePool, InstancePoolSpec
from cleave.api.resource import Metadata
from cleave.api.role import Role
from cleave.manifests.credentials import name_accounts
from cleave.manifests.owned_objects import (
    build_accounts,
    build_workers_service,
)
from cleave.manifests.worker import build_worker_pod
from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc

from e2e.cluster.cluster import CRDS, Cluster, CommandError, wait_until
from e2e.cluster.nodes import gpu_node

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def nodes(cluster: Cluster):
    if cluster.nodes is None:
        pytest.skip("needs nodes that a test may lose")
    cluster.nodes.add(gpu_node("one"), gpu_node("two"))
    yield cluster.nodes
    for name in ("one", "two"):
        cluster.nodes.lose(name)
        cluster.kubectl("delete", "node", name)


def test_the_api_server_takes_the_resource_definitions(cluster: Cluster) -> None:
    # Only tried: in a cluster that is not ours they may belong to somebody.
    cluster.kubectl(
        "apply", "--server-side", "--dry-run=server", "--force-conflicts", "-f", str(CRDS)
    )


def test_workers_are_scheduled_on_nodes_with_gpus_and_answer(
    cluster: Cluster, nodes, namespace: str
) -> None:
    owner = pool("chat", namespace)
    accounts = name_accounts(namespace, "chat")
    cluster.apply(
        *build_accounts(owner, accounts),
        build_workers_service(owner),
        namespace=namespace,
    )
    # Two, as a worker waits a while for peers to try a hand-off with.
    pods = [build_worker_pod(owner, number) for number in range(2)]
    for pod in pods:
        pod["spec"]["serviceAccountName"] = accounts.workers
        pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] = "1"
    cluster.apply(*pods, namespace=namespace)
    cluster.kubectl(
        *("wait", "--for=condition=Ready", "pod", "--all", "-n", namespace, "--timeout=110s")
    )
    for found in cluster.list("pods", namespace):
        assert found["spec"]["nodeName"] in ("one", "two")
        assert found["status"]["podIP"].startswith("10.77.")
        with grpc.insecure_channel(f"{found['status']['podIP']}:9000") as channel:
            agent = agent_pb2_grpc.AgentStub(channel)
            health = agent.Health(agent_pb2.HealthRequest(), timeout=30)
        assert health.registration.instance == found["metadata"]["name"]


def test_a_deleted_pod_gets_its_signal_and_its_grace(
    cluster: Cluster, nodes, namespace: str
) -> None:
    script = "trap 'sleep 1; echo drained; exit 0' TERM; echo up; while :; do sleep 0.1; done"
    cluster.apply(process("polite", ["sh", "-c", script]), namespace=namespace)
    wait_until(lambda: "up" in nodes.log("polite"), 120, "the process starts")
    cluster.kubectl("delete", "pod", "polite", "-n", namespace)
    assert "drained" in nodes.log("polite")


def test_a_pod_reads_secrets_config_maps_and_the_api_server(
    cluster: Cluster, nodes, namespace: str
) -> None:
    cluster.kubectl("create", "secret", "generic", "s", "--from-literal=k=hush", "-n", namespace)
    cluster.kubectl("create", "configmap", "c", "--from-literal=file=told", "-n", namespace)
    script = (
        'echo "$HUSH" "$(cat /etc/told/file)"; '
        "python -c 'from kubernetes import client, config; config.load_incluster_config(); "
        "print(client.VersionApi().get_code().git_version)'; sleep 60"
    )
    pod = process("reader", ["sh", "-c", script])
    container = pod["spec"]["containers"][0]
    secret = {"secretKeyRef": {"name": "s", "key": "k"}}
    container["env"] = [{"name": "HUSH", "valueFrom": secret}]
    container["volumeMounts"] = [{"name": "told", "mountPath": "/etc/told"}]
    pod["spec"]["volumes"] = [{"name": "told", "configMap": {"name": "c"}}]
    cluster.apply(pod, namespace=namespace)
    wait_until(lambda: "v1." in nodes.log("reader"), 120, "the API server answers the pod")
    assert nodes.log("reader").startswith("hush told\n")


def test_a_pod_with_a_read_only_root_writes_to_its_volumes_alone(
    cluster: Cluster, nodes, namespace: str
) -> None:
    script = (
        "echo here > /var/own/file; cat /var/own/file; echo > /etc/new || echo refused; sleep 60"
    )
    pod = process("writer", ["sh", "-c", script])
    container = pod["spec"]["containers"][0]
    container["securityContext"] = {"readOnlyRootFilesystem": True}
    container["volumeMounts"] = [{"name": "own", "mountPath": "/var/own"}]
    pod["spec"]["volumes"] = [{"name": "own", "emptyDir": {}}]
    cluster.apply(pod, namespace=namespace)
    wait_until(lambda: "refused" in nodes.log("writer"), 120, "the root is read-only")
    assert nodes.log("writer").startswith("here\n")


def test_a_service_leads_to_its_ready_pods(cluster: Cluster, nodes, namespace: str) -> None:
    pod = process("web", ["python", "-m", "http.server", "--bind", "$(IP)", "8000"])
    pod["metadata"]["labels"] = {"app": "web"}
    container = pod["spec"]["containers"][0]
    container["env"] = [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    container["readinessProbe"] = {"httpGet": {"path": "/", "port": 8000}, "periodSeconds": 1}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web"},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8000}]},
    }
    cluster.apply(pod, service, namespace=namespace)
    wait_until(lambda: cluster.endpoint("web", namespace), 120, "the Service has an endpoint")
    address = cluster.get("service", "web", namespace)["spec"]["clusterIP"]
    with urllib.request.urlopen(f"http://{address}/", timeout=30) as answer:
        assert answer.status == 200


def test_a_user_may_do_what_its_roles_say_and_no_more(cluster: Cluster, namespace: str) -> None:
    if cluster.control_plane is None:
        pytest.skip("needs users that a test may make up")
    viewer = cluster.control_plane.service_account(namespace, "viewer")
    with pytest.raises(CommandError, match="forbidden"):
        cluster.kubectl("get", "pods", "-n", namespace, kubeconfig=viewer)
    cluster.kubectl(
        *("create", "rolebinding", "viewer", "--clusterrole=view", "-n", namespace),
        f"--serviceaccount={namespace}:viewer",
    )
    cluster.kubectl("get", "pods", "-n", namespace, kubeconfig=viewer)
    with pytest.raises(CommandError, match="forbidden"):
        cluster.kubectl("delete", "pod", "any", "-n", namespace, kubeconfig=viewer)


def test_helm_speaks_to_the_cluster(cluster: Cluster) -> None:
    assert json.loads(cluster.helm("list", "-o", "json")) == []


def pool(name: str, namespace: str) -> InstancePool:
    return InstancePool(
        metadata=Metadata(name=f"{name}-mixed", namespace=namespace),
        spec=InstancePoolSpec(
            deployment=name,
            role=Role.MIXED,
            revision="r1",
            model={"source": "facebook/opt-13b", "servedName": name},
            engine=EngineSpec(type=EngineType.EMULATED),
        ),
    )


def process(name: str, command: list[str]) -> dict:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"containers": [{"name": "main", "image": "none", "command": command}]},
    }
