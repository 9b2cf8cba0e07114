"""What accounts and tokens of Cleave's pods open in a cluster, on a real API server."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import jwt
import pytest
import yaml

from cleave.manifests.labels import AGENT_PORT
from cleave.rpc.account_identity import split_credential
from cleave.rpc.credentials import METADATA_KEY, SCHEME
from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc

from e2e.cluster.cluster import Cluster, CommandError, wait_until
from e2e.cluster.tools import REPOSITORY
from e2e.test_cluster_operator import CHAT, SYSTEM, Chat, deployed, installed, is_pod_ready
from e2e.test_router_client import CLIENT
from tests.support.certificates import Files

__all__ = ["installed"]

pytestmark = pytest.mark.timeout(900)

MARK = "RECEIVED "
ROGUE = "rogue"


def bind_admin(cluster: Cluster, namespace: str, account: str) -> None:
    """An account that somebody has given all rights in a namespace."""
    cluster.kubectl("create", "serviceaccount", account, "-n", namespace)
    named = f"--serviceaccount={namespace}:{account}"
    cluster.kubectl("create", "rolebinding", account, "--clusterrole=admin", named, "-n", namespace)


def test_pods_never_run_as_an_account_that_was_there_before(
    installed: Cluster, namespace: str
) -> None:
    theirs = ("chat-workers", "chat-gateways", "chat-discovery", "chat-gateway", "chat")
    for account in theirs:
        bind_admin(installed, namespace, account)
    before = {name: installed.get("serviceaccount", name, namespace) for name in theirs}
    with deployed(installed, namespace) as chat:
        own = set(chat.accounts.names)
        pods = installed.list("pods", namespace)
        assert {pod["spec"]["serviceAccountName"] for pod in pods} == own
        bindings = json.loads(
            installed.kubectl("get", "rolebindings", "-n", namespace, "-o", "json")
        )["items"]
        for binding in bindings:
            if any(each["name"] in own for each in binding.get("subjects", [])):
                assert binding["roleRef"]["kind"] == "Role"
                assert binding["roleRef"]["name"] in own
    after = {name: installed.get("serviceaccount", name, namespace) for name in theirs}
    assert after == before, "not touched, and not deleted with the deployment"


@pytest.fixture
def rogue(installed: Cluster, tmp_path: Path) -> str:
    """The tag of an image whose agent writes what it receives to its log."""
    if installed.nodes is None:
        pytest.skip("needs nodes that run pods as processes")
    sources = tmp_path / "sources"
    for package in ("operator/cleave", "worker/cleave_worker"):
        copied = sources / Path(package).name
        shutil.copytree(REPOSITORY / package, copied, ignore=shutil.ignore_patterns("__pycache__"))
    file = sources / "cleave_worker" / "agent" / "authentication.py"
    text = file.read_text()
    honest = 'text = str(metadata.get(METADATA_KEY, ""))\n'
    assert honest in text
    shown = f'    print("{MARK}" + details.method + " " + text, flush=True)\n'
    file.write_text(text.replace(honest, honest + shown))
    installed.nodes.install(ROGUE, sources)
    return ROGUE


def read_received(chat: Chat, account: str) -> Iterator[tuple[str, str]]:
    """(method, what was shown) of the calls of an account that a rogue agent has received."""
    assert chat.cluster.nodes is not None
    for pod in chat.workers():
        for line in chat.cluster.nodes.log(pod["metadata"]["name"]).splitlines():
            _, mark, received = line.partition(MARK)
            if not mark:
                continue
            method, _, shown = received.partition(" ")
            token, _ = split_credential(shown.removeprefix(SCHEME))
            claims = jwt.decode(token, options={"verify_signature": False})
            if claims["sub"] == account:
                yield method, shown


@pytest.fixture
def victim(installed: Cluster) -> Iterator[Chat]:
    """A deployment of another team."""
    name = "team-b"
    installed.kubectl("create", "namespace", name)
    try:
        with deployed(installed, name) as found:
            yield found
    finally:
        installed.kubectl("delete", "namespace", name, "--wait=false")


def test_what_an_agent_receives_from_the_operator_opens_nothing(
    installed: Cluster, namespace: str, rogue: str, victim: Chat
) -> None:
    """An author's own image, and orders of the operator: an attack that drained other namespaces'
    workers while the operator showed all agents the same token."""
    manifest = yaml.safe_load(CHAT)
    manifest["spec"]["engine"] |= {"image": f"x:{rogue}", "args": ["--enable-lora"]}
    with deployed(installed, namespace, yaml.safe_dump(manifest)) as chat:
        chat.edit({"adapters": [{"name": "sql", "source": "org/sql"}]})
        operator = f"system:serviceaccount:{SYSTEM}:cleave-operator"
        wait_until(lambda: [*read_received(chat, operator)], 60, "the operator orders adapters")
        stolen = {shown for _, shown in read_received(chat, operator)}
        gateways = f"system:serviceaccount:{namespace}:{chat.accounts.gateways}"
        stolen |= {shown for _, shown in read_received(chat, gateways)}
        assert len({jwt_sub(shown) for shown in stolen}) == 2
        chat.open_workers()
        victim.open_workers()
        for pod in (*victim.workers(), *chat.workers()):
            for shown in stolen:
                token, _ = split_credential(shown)
                for relayed in (shown, token, token + "~" + shown.rpartition("~")[2]):
                    # Those of this pod were good for a minute and for itself: its agent has them.
                    if jwt_audience(shown).endswith(pod["metadata"]["uid"]) and relayed != token:
                        continue
                    assert_refused(pod, relayed)
        for pod in (*victim.workers(), *chat.workers()):
            assert is_pod_ready(pod)
        for shown in stolen:
            token = split_credential(shown.removeprefix(SCHEME))[0]
            with pytest.raises(CommandError, match=r"Unauthorized|logged in"):
                installed.kubectl("get", "pods", "-n", namespace, "--token", token,
                                  kubeconfig=anonymous(installed))  # fmt: skip


def jwt_sub(shown: str) -> str:
    token, _ = split_credential(shown.removeprefix(SCHEME))
    return str(jwt.decode(token, options={"verify_signature": False})["sub"])


def jwt_audience(shown: str) -> str:
    _, proof = split_credential(shown.removeprefix(SCHEME))
    return str(jwt.decode(proof, options={"verify_signature": False})["aud"])


def anonymous(cluster: Cluster) -> Path:
    """A kubeconfig file without credentials."""
    assert cluster.control_plane is not None
    path = cluster.control_plane.kubeconfig()
    config = yaml.safe_load(path.read_text())
    config["users"][0]["user"] = {}
    stripped = path.with_name("anonymous")
    stripped.write_text(yaml.safe_dump(config))
    return stripped


def assert_refused(pod: dict, shown: str) -> None:
    """That an agent neither says anything to the bearer nor does what he orders."""
    metadata = ((METADATA_KEY, shown),)
    with grpc.insecure_channel(f"{pod['status']['podIP']}:{AGENT_PORT}") as channel:
        agent = agent_pb2_grpc.AgentStub(channel)
        calls = (
            lambda: agent.Health(agent_pb2.HealthRequest(), timeout=10, metadata=metadata),
            lambda: agent.Drain(agent_pb2.DrainRequest(), timeout=10, metadata=metadata),
            lambda: next(agent.Watch(agent_pb2.WatchRequest(), timeout=10, metadata=metadata)),
        )
        for call in calls:
            with pytest.raises(grpc.RpcError) as refused:
                call()
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def request_token(
    cluster: Cluster, namespace: str, account: str, kubeconfig: Path | None = None, **spec: object
) -> str:
    """A token; `spec`: of the TokenRequest. Raises CommandError."""
    usual = {"audiences": ["cleave.dev/callers/x"], "expirationSeconds": 3600}
    request = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {k: v for k, v in (usual | spec).items() if v is not None},
    }
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
    said = cluster.kubectl(
        *("create", "--raw", path, "-f", "-"), input=json.dumps(request), kubeconfig=kubeconfig
    )
    return str(json.loads(said)["status"]["token"])


def test_accounts_request_tokens_of_their_own_for_agents_and_an_hour_only(
    installed: Cluster, namespace: str
) -> None:
    if installed.control_plane is None:
        pytest.skip("needs users that a test may make up")
    with deployed(installed, namespace) as chat:
        gateway, *_ = [
            pod
            for pod in installed.list("pods", namespace)
            if pod["spec"]["serviceAccountName"] == chat.accounts.gateways
        ]
        meta = gateway["metadata"]
        bound = {"apiVersion": "v1", "kind": "Pod", "name": meta["name"], "uid": meta["uid"]}
        # The token for the API server, as the kubelet mounts it.
        own = request_token(
            installed, namespace, chat.accounts.gateways, audiences=None, boundObjectRef=bound
        )
        config = yaml.safe_load(anonymous(installed).read_text())
        config["users"][0]["user"] = {"token": own}
        stolen = anonymous(installed).with_name("stolen")
        stolen.write_text(yaml.safe_dump(config))

        def request(account: str = chat.accounts.gateways, **spec: object) -> str:
            bound_spec = {"boundObjectRef": bound} | spec
            return request_token(installed, namespace, account, stolen, **bound_spec)

        assert request()
        others = [
            pod["metadata"]
            for pod in installed.list("pods", namespace)
            if pod["spec"]["serviceAccountName"] == chat.accounts.gateways and pod != gateway
        ]
        other_pods = [bound | {"name": each["name"], "uid": each["uid"]} for each in others]
        for spec, refusal in (
            ({"audiences": None}, "for agents only"),
            ({"audiences": ["cleave.dev/callers/x", "https://vault"]}, "for agents only"),
            ({"audiences": ["cleave.dev/agents"]}, "for agents only"),
            ({"expirationSeconds": 7200}, "for an hour at most"),
            ({"boundObjectRef": None}, "end with the pod that requests them"),
            *(({"boundObjectRef": each}, "end with the pod") for each in other_pods),
            ({"account": chat.accounts.workers}, "forbidden"),
            ({"account": "default"}, "forbidden"),
        ):
            with pytest.raises(CommandError) as error:
                request(**spec)
            assert refusal in error.value.text
        operator = installed.control_plane.service_account(SYSTEM, "cleave-operator")
        for account in (chat.accounts.workers, "default"):
            with pytest.raises(CommandError, match="of their own only"):
                request_token(installed, namespace, account, operator)


def test_the_operator_writes_only_the_roles_of_accounts(installed: Cluster, namespace: str) -> None:
    if installed.control_plane is None:
        pytest.skip("needs users that a test may make up")
    operator = installed.control_plane.service_account(SYSTEM, "cleave-operator")
    name, group = "chat-workers-0123abcd", "rbac.authorization.k8s.io"
    find = {
        "apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list"],
    }  # fmt: skip
    request = {
        "apiGroups": [""], "resources": ["serviceaccounts/token"], "verbs": ["create"],
        "resourceNames": [name],
    }  # fmt: skip
    subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}

    def write(kind: str, name: str = name, **fields: object) -> str:
        version = "v1" if kind == "ServiceAccount" else f"{group}/v1"
        meta = {"name": name, "namespace": namespace, "labels": {"cleave.dev/deployment": "chat"}}
        document = {"apiVersion": version, "kind": kind, "metadata": meta, **fields}
        command = ("create", "--dry-run=server", "-f", "-")
        try:
            return installed.kubectl(*command, input=yaml.safe_dump(document), kubeconfig=operator)
        except CommandError as error:
            return error.text

    def bind(subjects: list[dict], kind: str = "Role", role: str = name) -> str:
        ref = {"apiGroup": group, "kind": kind, "name": role}
        return write("RoleBinding", subjects=subjects, roleRef=ref)

    everything = {"apiGroups": [""], "resources": ["pods"], "verbs": ["create"]}
    wait_until(lambda: "created" in write("Role", rules=[find, request]), 60, "what it writes")
    for rules in (
        [find],
        [request],
        [find, request, everything],
        [find, {k: v for k, v in request.items() if k != "resourceNames"}],
        [find, request | {"resourceNames": [name, "admin"]}],
        [find, request | {"resourceNames": ["admin"]}],
        [everything, request],
        [],
    ):
        assert "roles of Cleave allow to" in write("Role", rules=rules)
    others = ("chat-workers", "admin", "other-workers-0123abcd", f"{name}0")
    # The API server looks for the role of a binding first.
    for each in (name, *others):
        rule = ("--verb=list", "--resource=endpointslices.discovery.k8s.io")
        installed.kubectl("create", "role", each, *rule, "-n", namespace)
    for kind in ("ServiceAccount", "Role", "RoleBinding"):
        for other in others:
            fields = {"Role": {"rules": [find, request]}}.get(kind, {})
            if kind == "RoleBinding":
                fields = {
                    "roleRef": {"apiGroup": group, "kind": "Role", "name": other},
                    "subjects": [subject | {"name": other}],
                }
            assert "are named DEPLOYMENT-gateways-HASH" in write(kind, other, **fields)
    refused = "give the role of their name to the account of their name"
    assert refused in bind([subject | {"name": "default"}])
    assert refused in bind([subject | {"namespace": "default"}])
    assert refused in bind([subject, subject | {"name": "default"}])
    assert refused in bind([])
    assert refused in bind([{"kind": "User", "apiGroup": group, "name": name}])
    # RBAC itself refuses what the operator may not do.
    for text in (bind([subject], "ClusterRole", "cluster-admin"), bind([subject], role="admin")):
        assert refused in text or "forbidden" in text or "not found" in text


def test_a_gateway_of_ones_own_uses_the_router_by_its_certificate(
    installed: Cluster, namespace: str, tmp_path: Path
) -> None:
    """Through the Service, to engines that ask for the keys of picks."""
    for name in ("router", "caller"):
        (tmp_path / name).mkdir()
    caller = Files(tmp_path / "caller").write()
    with deployed(installed, namespace) as chat:
        chat.open_workers()
        address = chat.address.partition(":")[0]
        router = Files(tmp_path / "router").write(address=address)
        secret = ("chat-router", "-n", namespace, "--type=kubernetes.io/tls")
        files = (router.certificate, router.key, f"ca.crt={caller.certificate}")
        given = (f"--from-file={file}" for file in files)
        installed.kubectl("create", "secret", "generic", *secret, *given)
        chat.edit({"gateway": {"routerTlsSecret": "chat-router"}})
        wait_until(
            lambda: installed.endpoint("chat", namespace, "router"), 120, "a gateway has the port"
        )
        body = {"model": "chat", "prompt": "Once upon a time", "max_tokens": 16}
        answer = httpx.post(f"http://{chat.address}/v1/completions", json=body, timeout=60)
        text = answer.json()["choices"][0]["text"]
        for shown in (caller, router):
            line = [sys.executable, CLIENT, "--router", f"{address}:9003", "--model", "chat"]
            line += ["--ca", router.certificate, "--cert", shown.certificate, "--key", shown.key]
            ended = subprocess.run(
                [*line, "Once upon a time"], capture_output=True, text=True, timeout=60, check=False
            )
            assert ended.stdout == (f"{text}\n" if shown is caller else ""), ended.stderr
