"""The operator on a real control plane: installed as users do, with exactly its own rights."""

import asyncio
import json
import os
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import grpc
import httpx
import pytest
import yaml
from kubernetes.utils.quantity import parse_quantity

from cleave.manifests.credentials import Accounts, name_accounts
from cleave.manifests.labels import AGENT_PORT
from cleave.rpc.account_identity import TOKEN_LIFE_S, AccountIdentity, IssuedToken
from cleave.rpc.credentials import (
    METADATA_KEY,
    SCHEME,
    AgentEndpoint,
    Credentials,
    Metadata,
)
from cleave.rpc.engine_key import build_headers
from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc

from e2e.cluster import tools
from e2e.cluster.closed_loop_load import TIMEOUT_S, Load, ask
from e2e.cluster.cluster import WITHOUT_GUARD, Cluster, CommandError, wait_until
from e2e.cluster.nodes import Nodes, gpu_node

CHART = tools.REPOSITORY / "charts" / "cleave"
SYSTEM = "cleave-system"
LEASE = "cleave-operator"
READY_S = 400
"""Planning takes seconds of CPU, and other lanes of `make test` leave it little."""

CHAT = """
apiVersion: cleave.dev/v1alpha1
kind: LLMDeployment
metadata: {name: chat}
spec:
  model: {source: facebook/opt-13b, servedName: chat, maxModelLen: 8192}
  slo: {ttftMs: 400, tpotMs: 40}
  engine: {type: Emulated, emulated: {timeScale: 0.2}}
  placement:
    manual:
      - {role: prefill, replicas: 1}
      - {role: decode, replicas: 2}
"""

OPEN_WORKERS = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "tests-call-workers"},
    "spec": {
        "podSelector": {"matchLabels": {"cleave.dev/component": "worker"}},
        "policyTypes": ["Ingress"],
        "ingress": [{}],
    },
}
"""Lets a test call agents and engines where policies are enforced; policies add up."""

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def installed(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster with the operator, installed in one command."""
    with installation(cluster):
        yield cluster


@contextmanager
def installation(cluster: Cluster, *args: str, chart: Path = CHART) -> Iterator[None]:
    """A chart, with two nodes if they are ours; nothing of it is left afterwards."""
    nodes = (gpu_node("node-a", clique="a"), gpu_node("node-b", clique="b"))
    with cluster.lend_nodes(*nodes):
        try:
            cluster.helm(
                *("install", "cleave", str(chart), "-n", SYSTEM, "--create-namespace"),
                *("--wait", "--timeout", "120s", "--take-ownership", *args),
                *shlex.split(os.environ.get("HELM_ARGS", "")),
                timeout_s=150,
            )
            yield
        except CommandError as error:
            raise AssertionError(f"{error.text}\n{read_log(cluster)}") from error
        finally:
            cluster.helm("uninstall", "cleave", "-n", SYSTEM, *WITHOUT_GUARD)


@pytest.fixture
def nodes(installed: Cluster) -> Nodes:
    if installed.nodes is None:
        pytest.skip("needs nodes that a test may break")
    return installed.nodes


@pytest.fixture
def chat(installed: Cluster, namespace: str) -> Iterator["Chat"]:
    """A deployment that is ready; deleted afterwards."""
    with deployed(installed, namespace) as found:
        yield found


@contextmanager
def deployed(cluster: Cluster, namespace: str, manifest: str = CHAT) -> Iterator["Chat"]:
    """The deployment `chat` of a manifest, ready; deleted afterwards."""
    found = Chat(cluster, namespace)
    cluster.kubectl("apply", "-n", namespace, "-f", "-", input=manifest)
    try:
        found.until_ready()
        yield found
    finally:
        cluster.kubectl("delete", "llmd", "--all", "-n", namespace, timeout_s=180)


class Chat:
    """The deployment `chat` in a namespace."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster = cluster
        self.namespace = namespace

    @property
    def deployment(self) -> dict:
        return self.cluster.get("llmd", "chat", self.namespace) or {}

    @property
    def address(self) -> str:
        """Of the gateway's Service, as clients inside the cluster reach it."""
        service = self.cluster.get("service", "chat", self.namespace)
        assert service is not None
        if self.cluster.has_service_addresses:
            return f"{service['spec']['clusterIP']}:80"
        endpoint = self.cluster.endpoint("chat", self.namespace, "http")
        assert endpoint is not None
        return endpoint

    @property
    def accounts(self) -> Accounts:
        """The service accounts of its pods."""
        uid = self.deployment["metadata"]["uid"]
        return name_accounts(self.namespace, "chat", uid)

    def sign_call(self, pod: dict, account: str = "") -> Metadata:
        """What a call of a pod's agent shows, as its gateways sign it, or another account."""

        async def request(audience: str) -> IssuedToken:
            named = (account or self.accounts.gateways, "-n", self.namespace)
            token = self.cluster.kubectl("create", "token", *named, f"--audience={audience}")
            return IssuedToken(token.strip(), time.time() + TOKEN_LIFE_S)

        meta, address = pod["metadata"], f"{pod['status']['podIP']}:{AGENT_PORT}"
        agent = AgentEndpoint(address, meta["name"], meta["uid"])
        return asyncio.run(Credentials(identity=AccountIdentity(request)).build_metadata(agent))

    def open_workers(self) -> None:
        """Let the test call agents and engines of this namespace, also where that is denied."""
        self.cluster.apply(OPEN_WORKERS, namespace=self.namespace)
        addresses = [pod["status"]["podIP"] for pod in self.workers()]
        wait_until(
            lambda: all(_accepts_connections(address, AGENT_PORT) for address in addresses),
            30,
            "agents accept connections",
        )

    def workers(self, role: str = "") -> list[dict]:
        """Worker pods that are meant to stay."""
        selector = "cleave.dev/component=worker" + (f",cleave.dev/role={role}" if role else "")
        pods = self.cluster.list("pods", self.namespace, selector)
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def until_ready(self, timeout_s: float = READY_S) -> None:
        try:
            wait_until(self.is_ready, timeout_s, "the deployment is ready")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{read_log(self.cluster, self.namespace)}") from error

    def is_ready(self) -> bool:
        """Whether exactly the latest desired objects exist."""
        found = self.deployment
        status = found.get("status", {})
        return (
            status.get("observedGeneration") == found["metadata"]["generation"]
            and condition(found, "Ready") == "True"
            and condition(found, "Progressing") != "True"
        )

    def edit(self, spec: dict) -> None:
        patch = json.dumps({"spec": spec})
        self.cluster.kubectl(
            *("patch", "llmd", "chat", "-n", self.namespace, "--type=merge", "-p", patch)
        )

    def ask(self, tokens: int = 16, model: str = "chat", timeout_s: float = TIMEOUT_S) -> str:
        messages = [{"role": "user", "content": "What is a river?"}]
        question = {"model": model, "messages": messages, "max_tokens": tokens, "stream": True}
        return ask(self.address, question, timeout_s)


def test_an_applied_manifest_ends_in_an_answered_chat(chat: Chat) -> None:
    assert [len(chat.workers(role)) for role in ("prefill", "decode")] == [1, 2]
    assert chat.ask() == ""
    chat.cluster.kubectl(
        *("wait", "--for=condition=Ready", "llmd/chat", "-n", chat.namespace, "--timeout=60s")
    )


def test_an_edit_rolls_out_under_load_without_a_failed_request(chat: Chat) -> None:
    before = {pod["metadata"]["uid"] for pod in chat.workers()}
    # A pod that once was ready counts: on a busy machine a probe may fail.
    been_ready = set(before)
    seen: list[tuple[int, int]] = []

    def is_rolled_out() -> bool:
        decode = chat.workers("decode")
        been_ready.update(pod["metadata"]["uid"] for pod in decode if is_pod_ready(pod))
        seen.append((len(decode), sum(pod["metadata"]["uid"] in been_ready for pod in decode)))
        return chat.is_ready() and not before & {p["metadata"]["uid"] for p in chat.workers()}

    with Load(chat.address, "chat") as load:
        wait_until(lambda: load.answered > 20, 120, "the load is on")
        chat.edit({"engine": {"env": [{"name": "EDITED", "value": "1"}]}})
        try:
            wait_until(is_rolled_out, READY_S, "every instance is replaced")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{read_log(chat.cluster, chat.namespace)}") from error
        after = load.answered
        with suppress(AssertionError):
            wait_until(lambda: load.answered > after + 20, 120, "the new instances answer")
    assert load.failures == []
    assert load.answered > after + 20, "the new instances answer"
    assert max(total for total, _ in seen) <= 3, "never more than one above the wanted two"
    assert min(ready for _, ready in seen) >= 2, "never fewer than the wanted two"
    assert [len(chat.workers(role)) for role in ("prefill", "decode")] == [1, 2]


def test_a_changed_model_answers_as_soon_as_the_deployment_is_ready(chat: Chat) -> None:
    chat.edit({"model": {"source": "facebook/opt-66b", "servedName": "other"}})
    chat.cluster.kubectl(
        *("wait", "--for=condition=Ready", "llmd/chat", "-n", chat.namespace),
        f"--timeout={READY_S}s",
        timeout_s=READY_S + 10,
    )
    # Connections go to both gateways.
    assert [chat.ask(model="other") for _ in range(8)] == [""] * 8
    found = chat.deployment
    assert found["status"]["model"] == "other"
    assert found["status"]["rolledOutGeneration"] == found["metadata"]["generation"]


def test_a_lost_nodes_instances_are_replaced(chat: Chat, nodes: Nodes) -> None:
    lost = chat.workers("decode")[0]["spec"]["nodeName"]
    gone = {pod["metadata"]["uid"] for pod in chat.workers() if pod["spec"]["nodeName"] == lost}
    nodes.lose(lost)
    try:
        wait_until(
            lambda: chat.is_ready() and not gone & {p["metadata"]["uid"] for p in chat.workers()},
            READY_S,
            "instances of the lost node are replaced",
        )
        wait_until(lambda: chat.ask() == "", 30, "the others answer")
    finally:
        chat.cluster.kubectl("delete", "node", lost)
        nodes.add(gpu_node(lost))


def test_an_unschedulable_scale_up_is_reverted_and_reported(chat: Chat) -> None:
    # Two find room on a node beside what runs there, and never six on two.
    share = {"cpu": f"{int(free_cores(chat.cluster) / 2.2 * 1000)}m"}
    chat.edit(
        {
            "rollout": {"pendingTimeoutS": 10},
            "template": {"resources": {"requests": share, "limits": share}},
        }
    )
    chat.until_ready()
    pool = ("ipool/chat-decode", "-n", chat.namespace)
    chat.cluster.kubectl("patch", *pool, "--type=merge", "-p", '{"spec":{"owner":"Manual"}}')
    chat.cluster.kubectl("scale", *pool, "--replicas=6")
    try:
        wait_until(
            lambda: condition(chat.deployment, "ScalingLimited") == "True", 90, "it is reported"
        )
        wait_until(lambda: all(map(is_pod_ready, chat.workers())), 60, "nothing stays pending")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{read_log(chat.cluster, chat.namespace)}") from error
    assert "Insufficient cpu" in message(chat.deployment, "ScalingLimited")
    assert chat.ask() == ""


def test_agents_answer_callers_with_a_token_of_their_deployment_only(
    chat: Chat, namespace: str
) -> None:
    (pod, sibling, *_) = chat.workers()
    chat.cluster.kubectl("create", "serviceaccount", "other", "-n", namespace)
    for_the_api_server = ("create", "token", chat.accounts.gateways, "-n", chat.namespace)
    ((_, relayed),) = chat.sign_call(sibling)
    tokens = {
        "none": (),
        "forged": ((METADATA_KEY, f"{SCHEME}a.b.c"),),
        "of another account": chat.sign_call(pod, "other"),
        "for the API server": (
            (METADATA_KEY, SCHEME + chat.cluster.kubectl(*for_the_api_server).strip()),
        ),
        "for a sibling": ((METADATA_KEY, relayed),),
        "a token alone": ((METADATA_KEY, relayed.partition("~")[0]),),
    }
    chat.open_workers()
    with grpc.insecure_channel(f"{pod['status']['podIP']}:{AGENT_PORT}") as channel:
        agent = agent_pb2_grpc.AgentStub(channel)
        health = agent_pb2.HealthRequest()
        drain = agent_pb2.DrainRequest()
        for what, metadata in tokens.items():
            for call, request in ((agent.Health, health), (agent.Drain, drain)):
                with pytest.raises(grpc.RpcError) as refused:
                    call(request, timeout=10, metadata=metadata)
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED, what
        worker = chat.sign_call(pod, chat.accounts.workers)
        order = agent_pb2.SetRoleRequest(role=agent_pb2.ROLE_MIXED, epoch=9)
        for call, request in ((agent.SetRole, order), (agent.Drain, drain)):
            with pytest.raises(grpc.RpcError) as refused:
                call(request, timeout=10, metadata=worker)
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        watch = agent.Watch(agent_pb2.WatchRequest(), timeout=10, metadata=worker)
        with pytest.raises(grpc.RpcError) as refused:
            next(watch)
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert agent.Health(health, timeout=10, metadata=worker).registration.engine_key
        accepted = agent.Health(health, timeout=10, metadata=chat.sign_call(pod))
    url = accepted.registration.engine_url
    assert httpx.get(f"{url}/v1/models", timeout=10).status_code == 401
    headers = build_headers(accepted.registration.engine_key)
    assert httpx.get(f"{url}/v1/models", headers=headers, timeout=10).status_code == 200
    assert accepted.registration.instance == pod["metadata"]["name"]
    assert chat.ask() == ""


def test_what_protects_a_deployment_comes_back_when_it_is_deleted_or_opened(chat: Chat) -> None:
    for kind, name in (
        ("networkpolicy", "chat-workers"),
        ("networkpolicy", "chat-gateway"),
        *(
            (kind, name)
            for kind in ("role", "rolebinding", "serviceaccount")
            for name in chat.accounts.names
        ),
    ):
        chat.cluster.kubectl("delete", kind, name, "-n", chat.namespace)
        find = partial(chat.cluster.get, kind, name, chat.namespace)
        wait_until(find, 60, f"{kind} {name} is there again")

    edit = '[{"op": "replace", "path": "/spec/ingress", "value": [{}]}]'
    policy = ("networkpolicy", "chat-workers", "-n", chat.namespace)
    chat.cluster.kubectl("patch", *policy, "--type=json", "-p", edit)

    def is_closed() -> bool:
        read = chat.cluster.get("networkpolicy", "chat-workers", chat.namespace)
        return read["spec"]["ingress"] != [{}]

    wait_until(is_closed, 60, "the policy is as the operator made it")
    before = chat.cluster.get("networkpolicy", "chat-workers", chat.namespace)
    time.sleep(3)
    after = chat.cluster.get("networkpolicy", "chat-workers", chat.namespace)
    assert after["metadata"]["generation"] == before["metadata"]["generation"]


def test_another_operator_takes_over_and_does_nothing_twice(chat: Chat, nodes: Nodes) -> None:
    leader = wait_until(lambda: holder(chat.cluster), 60, "an operator leads")
    chat.edit({"placement": {"manual": placement(prefill=3, decode=4)}})
    nodes.kill(leader.partition("_")[0])
    killed = time.monotonic()
    wait_until(lambda: holder(chat.cluster) not in ("", leader), 60, "another operator leads")
    took_s = time.monotonic() - killed
    wait_until(
        lambda: chat.is_ready() and len(chat.workers()) == 7, READY_S, "the edit is carried out"
    )
    log_files = list((nodes.folder / "pods").glob(f"{chat.namespace}_chat-[pd]*.log"))
    assert len(log_files) == 7, "one pod for each instance, and none too many"
    print(f"took over after {took_s:.1f} s")


def test_changes_while_no_operator_runs_are_carried_out_afterwards(chat: Chat) -> None:
    operator = ("deployment/cleave-operator", "-n", SYSTEM)
    chat.cluster.kubectl("scale", *operator, "--replicas=0")
    try:
        wait_until(lambda: not chat.cluster.list("pods", SYSTEM), 60, "no operator is left")
        chat.edit({"placement": {"manual": placement(prefill=2, decode=1)}})
        victim = chat.workers("prefill")[0]["metadata"]["name"]
        chat.cluster.kubectl("delete", "pod", victim, "-n", chat.namespace)
        chat.cluster.kubectl("delete", "service", "chat-workers", "-n", chat.namespace)
    finally:
        chat.cluster.kubectl("scale", *operator, "--replicas=2")
    wait_until(
        lambda: (
            [len(chat.workers(role)) for role in ("prefill", "decode")] == [2, 1]
            and chat.is_ready()
        ),
        READY_S,
        "everything is as asked for",
    )
    wait_until(lambda: chat.ask() == "", 30, "it answers")


def test_a_deleted_deployment_drains_and_leaves_nothing(chat: Chat) -> None:
    faults: list[str] = []
    stream = threading.Thread(target=lambda: faults.append(chat.ask(tokens=400)))
    stream.start()
    time.sleep(0.5)
    chat.cluster.kubectl("delete", "llmd", "chat", "-n", chat.namespace, timeout_s=180)
    stream.join()
    assert faults == [""]

    def left() -> list[str]:
        kinds = "pods,services,deployments,instancepools,poddisruptionbudgets"
        return chat.cluster.kubectl("get", kinds, "-n", chat.namespace, "-o", "name").split()

    wait_until(lambda: not left(), 60, "nothing is left")


def free_cores(cluster: Cluster) -> float:
    """Cores that no pod has requested, of the node with the fewest."""
    free = {
        node["metadata"]["name"]: float(parse_quantity(node["status"]["allocatable"]["cpu"]))
        for node in cluster.list("nodes")
    }
    for pod in cluster.list("pods", namespace=""):
        for container in pod["spec"]["containers"]:
            requests = container.get("resources", {}).get("requests", {})
            if (name := pod["spec"].get("nodeName")) in free:
                free[name] -= float(parse_quantity(requests.get("cpu", "0")))
    return min(free.values())


def placement(**replicas: int) -> list[dict[str, object]]:
    return [{"role": role, "replicas": count} for role, count in replicas.items()]


def _accepts_connections(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=2).close()
    except OSError:
        return False
    return True


def condition(found: dict, kind: str) -> str:
    return str(_condition(found, kind).get("status", ""))


def message(found: dict, kind: str) -> str:
    return str(_condition(found, kind).get("message", ""))


def _condition(found: dict, kind: str) -> dict:
    conditions = found.get("status", {}).get("conditions", [])
    return next((each for each in conditions if each["type"] == kind), {})


def is_pod_ready(pod: dict) -> bool:
    return condition(pod, "Ready") == "True"


def holder(cluster: Cluster) -> str:
    """Who leads: the operator's pod, and which of its lives."""
    lease = cluster.get("lease", LEASE, SYSTEM) or {}
    return str(lease.get("spec", {}).get("holderIdentity", ""))


def read_log(cluster: Cluster, namespace: str = SYSTEM) -> str:
    """What helps to understand a failure."""
    parts: list[Callable[[], str]] = [
        lambda: yaml.safe_dump([d.get("status") for d in cluster.list("llmd", namespace)]),
        lambda: cluster.kubectl("get", "pods", "-A", "-o", "wide"),
        lambda: cluster.kubectl("get", "events", "-n", namespace),
    ]
    text = []
    for part in parts:
        try:
            text.append(part())
        except CommandError as error:
            text.append(str(error))
    if cluster.nodes is not None:
        for log in (cluster.nodes.folder / "pods").glob(f"{SYSTEM}_*.log"):
            lines = log.read_text(errors="replace").splitlines()[-25:]
            text.append("\n".join([f"== {log.name}", *lines]))
    return "\n".join(text)
