"""NetworkPolicies of deployments and the operator, enforced on real nodes (`make e2e-node`).

Attempts start inside pods, and go to every port on which the pods they try listen.
"""

import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

from cleave.manifests.labels import AGENT_PORT, GATEWAY_PORT, INTERNAL_PORT

from e2e.cluster.cluster import Cluster, wait_until
from e2e.real_nodes import network
from e2e.real_nodes.sandbox import FOLDER_VARIABLE
from e2e.test_cluster_operator import CHAT, SYSTEM, Chat, condition, installation

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(FOLDER_VARIABLE not in os.environ, reason="run `make e2e-node`"),
]

METADATA = "169.254.169.254"
"""Address at which clouds serve credentials of the node."""
MIRROR_PORT = 8000
"""Port that workers may connect to in this installation."""
OPERATORS_PORTS = {9443}
"""The webhook: the address of the API server is not known to the chart. Metrics are closed."""

_LIST_PORTS = """
import pathlib
for name in ("tcp", "tcp6"):
    for line in pathlib.Path("/proc/net", name).read_text().splitlines()[1:]:
        local, state = line.split()[1], line.split()[3]
        if state == "0A":
            print(int(local.rpartition(":")[2], 16))
"""
_CONNECT = """
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor

def reaches(target):
    try:
        socket.create_connection(target, timeout=3).close()
    except OSError:
        return False
    return True

targets = [tuple(each) for each in json.loads(sys.argv[1])]
with ThreadPoolExecutor(32) as pool:
    answers = zip(targets, pool.map(reaches, targets))
    print(json.dumps([target for target, is_reached in answers if is_reached]))
"""
Target = tuple[str, int]


class Site:
    """A namespace with the deployment `chat` beside the deployment `other`, and with strangers."""

    def __init__(self, cluster: Cluster, namespace: str, outside: str) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.outside = outside
        """Another namespace."""

    def pods(self, deployment: str, component: str) -> list[dict]:
        labels = f"cleave.dev/deployment={deployment},cleave.dev/component={component}"
        return self.cluster.list("pods", self.namespace, labels)

    def operators(self) -> list[dict]:
        return self.cluster.list("pods", SYSTEM, "app.kubernetes.io/component=operator")

    def list_targets(self, pods: Sequence[dict]) -> list[Target]:
        """Address and port of everything on which pods listen."""
        return [
            (pod["status"]["podIP"], int(port))
            for pod in pods
            for port in sorted({*self._run(pod, _LIST_PORTS).split()})
        ]

    def reach(self, pod: dict, targets: Sequence[Target]) -> set[Target]:
        """Those of `targets` that accept a connection from inside a pod."""
        answer = self._run(pod, _CONNECT, json.dumps(targets))
        return {(address, port) for address, port in json.loads(answer)}

    def _run(self, pod: dict, program: str, *args: str) -> str:
        metadata = pod["metadata"]
        inside = ("exec", "-n", metadata["namespace"], metadata["name"], "--")
        return self.cluster.kubectl(*inside, "python", "-c", program, *args)

    def start_stranger(self, name: str, namespace: str, labels: dict[str, str]) -> dict:
        """A pod that belongs to nothing of Cleave's, in a worker's image."""
        (worker, *_) = self.pods("chat", "worker")
        container = {
            "name": "stranger",
            "image": worker["spec"]["containers"][0]["image"],
            "command": ["python", "-c", "import time; time.sleep(3600)"],
        }
        spec = {"containers": [container], "terminationGracePeriodSeconds": 0}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}}
        self.cluster.apply({**pod, "spec": spec}, namespace=namespace)
        ready = ("--for=condition=Ready", f"pod/{name}", "-n", namespace, "--timeout=60s")
        self.cluster.kubectl("wait", *ready)
        found = self.cluster.get("pods", name, namespace)
        assert found is not None
        return found


@pytest.fixture(scope="module")
def site(cluster: Cluster) -> Iterator[Site]:
    """Both deployments, ready."""
    namespace, outside = "test-policies", "test-policies-outside"
    other = yaml.safe_load(CHAT)
    other["metadata"]["name"] = "other"
    with installation(cluster, "--set", f"networkPolicy.egressPorts={{{MIRROR_PORT}}}"):
        for name in (namespace, outside):
            cluster.kubectl("create", "namespace", name)
        try:
            cluster.apply(yaml.safe_load(CHAT), other, namespace=namespace)
            Chat(cluster, namespace).until_ready()
            wait_until(
                lambda: condition(cluster.get("llmd", "other", namespace) or {}, "Ready") == "True",
                120,
                "the other deployment is ready",
            )
            yield Site(cluster, namespace, outside)
        finally:
            cluster.kubectl("delete", "llmd", "--all", "-n", namespace, timeout_s=180)
            for name in (namespace, outside):
                cluster.kubectl("delete", "namespace", name, "--wait=false")


def test_a_worker_reaches_only_public_ports_of_what_is_not_its_deployment(site: Site) -> None:
    gateways, operators = site.pods("other", "gateway"), site.operators()
    targets = site.list_targets([*site.pods("other", "worker"), *gateways, *operators])
    ports = {port for _, port in targets}
    assert {AGENT_PORT, GATEWAY_PORT, INTERNAL_PORT} | OPERATORS_PORTS <= ports
    # Egress of workers is closed, too: even the operator's open ports are not theirs to call.
    assert site.reach(site.pods("chat", "worker")[0], targets) == set()


def test_a_worker_reaches_all_of_its_own_deployment(site: Site) -> None:
    first, *others = site.pods("chat", "worker")
    targets = {(pod["status"]["podIP"], AGENT_PORT) for pod in others}
    assert site.reach(first, [*targets]) == targets


@pytest.mark.parametrize("claims", [{}, {"cleave.dev/deployment": "chat"}])
def test_a_stranger_in_another_namespace_reaches_only_public_ports(
    site: Site, claims: dict[str, str]
) -> None:
    """Also one that says that it is a gateway of the deployment."""
    labels = claims | ({"cleave.dev/component": "gateway"} if claims else {})
    stranger = site.start_stranger("liar" if claims else "stranger", site.outside, labels)
    gateways, operators = site.pods("chat", "gateway"), site.operators()
    targets = site.list_targets([*site.pods("chat", "worker"), *gateways, *operators])
    public = {(pod["status"]["podIP"], GATEWAY_PORT) for pod in gateways}
    public |= {(pod["status"]["podIP"], port) for pod in operators for port in OPERATORS_PORTS}
    assert site.reach(stranger, targets) == public


def test_a_stranger_in_the_deployments_namespace_reaches_the_public_port_only(site: Site) -> None:
    stranger = site.start_stranger("neighbour", site.namespace, {})
    gateways = site.pods("chat", "gateway")
    targets = site.list_targets([*site.pods("chat", "worker"), *gateways])
    public = {(pod["status"]["podIP"], GATEWAY_PORT) for pod in gateways}
    assert site.reach(stranger, targets) == public


def test_the_operator_reaches_agents_and_internal_ports_and_no_engine(site: Site) -> None:
    workers, gateways = site.pods("chat", "worker"), site.pods("chat", "gateway")
    expected = {(pod["status"]["podIP"], AGENT_PORT) for pod in workers}
    expected |= {(pod["status"]["podIP"], INTERNAL_PORT) for pod in gateways}
    targets = site.list_targets([*workers, *gateways])
    assert site.reach(site.operators()[0], targets) == expected


POOL = """
apiVersion: cleave.dev/v1alpha1
kind: InstancePool
metadata: {name: alone}
spec:
  deployment: alone
  role: mixed
  owner: Manual
  revision: first
  model: {source: facebook/opt-13b, servedName: alone, maxModelLen: 8192}
  engine: {type: Emulated}
"""


def test_workers_of_a_pool_without_a_deployment_are_as_closed(site: Site) -> None:
    cluster = site.cluster
    cluster.kubectl("apply", "-n", site.namespace, "-f", "-", input=POOL)
    try:
        selector = "cleave.dev/pool=alone"
        (worker,) = wait_until(
            lambda: [
                pod
                for pod in cluster.list("pods", site.namespace, selector)
                if condition(pod, "Ready") == "True"
            ],
            120,
            "the pool's worker is ready",
        )
        stranger = site.start_stranger("passer-by", site.outside, {})
        targets = site.list_targets([worker])
        assert AGENT_PORT in {port for _, port in targets}
        assert site.reach(stranger, targets) == set()
        assert site.reach(site.pods("chat", "worker")[0], targets) == set()
    finally:
        cluster.kubectl("delete", "ipool", "alone", "-n", site.namespace, timeout_s=120)


def test_nothing_of_a_deployment_reaches_the_metadata_address(site: Site) -> None:
    stranger = site.start_stranger("free", site.outside, {})
    credentials = [(METADATA, 80), (METADATA, MIRROR_PORT)]
    mirror = (network.GATEWAY, MIRROR_PORT)
    with network.lent_address(METADATA), listening(80), listening(MIRROR_PORT):
        targets = [*credentials, mirror]
        assert site.reach(stranger, targets) == {*targets}, "the address answers"
        assert site.reach(site.pods("chat", "worker")[0], targets) == {mirror}
        assert site.reach(site.pods("chat", "gateway")[0], targets) == set()


@contextmanager
def listening(port: int) -> Iterator[None]:
    """An HTTP server at all addresses of the sandbox."""
    server = ThreadingHTTPServer(("", port), BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
