"""The chart on a real API server: what it installs, whom it lets in, what it leaves behind."""

import base64
import json
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from e2e.cluster.cluster import WITHOUT_GUARD, Cluster, CommandError, wait_until
from e2e.cluster.nodes import gpu_node
from e2e.cluster.tools import REPOSITORY
from e2e.test_cluster_operator import READY_S

pytestmark = pytest.mark.timeout(900)

CHART = REPOSITORY / "charts" / "cleave"
HOME = "cleave-install"
RETAINED_CRDS = ("llmdeployments.cleave.dev", "instancepools.cleave.dev")


@pytest.fixture(scope="module")
def release(cluster: Cluster):
    """The chart with its defaults, except that a webhook that is away refuses everything."""
    if cluster.control_plane is None:
        pytest.skip("installs and uninstalls cluster-wide objects")
    with cluster.lend_nodes(gpu_node("home")):
        helm(cluster, "install", "--create-namespace", "--take-ownership")
        yield cluster
        cluster.helm("uninstall", "cleave", "-n", HOME, *WITHOUT_GUARD)
        cluster.kubectl("delete", "namespace", HOME, "--wait=false")


def helm(cluster: Cluster, verb: str, *args: str, chart: Path = CHART) -> str:
    fail = ("--set", "webhook.failurePolicy=Fail")
    return cluster.helm(
        verb, "cleave", str(chart), "-n", HOME, *fail, "--wait", "--timeout", "2m", *args
    )


def operators(cluster: Cluster, count: int) -> None:
    cluster.kubectl("scale", "deployment/cleave-operator", f"--replicas={count}", "-n", HOME)
    wait_until(
        lambda: len(cluster.list("pods", HOME)) == count, 120, f"there are {count} operators"
    )
    cluster.kubectl("rollout", "status", "deployment/cleave-operator", "-n", HOME)


def bundle(cluster: Cluster) -> str:
    found = cluster.get("validatingwebhookconfiguration", "cleave-webhook")
    return found["webhooks"][0]["clientConfig"].get("caBundle", "")


def deployment(**spec) -> dict:
    smallest = {"model": "facebook/opt-13b", "slo": {"ttftMs": 400, "tpotMs": 40}}
    return {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "asked"},
        "spec": {**smallest, **spec},
    }


def test_two_operators_come_up_and_make_the_webhooks_certificate(release: Cluster) -> None:
    found = release.get("deployment", "cleave-operator", HOME)
    assert found["status"]["readyReplicas"] == 2
    wait_until(lambda: bundle(release), 120, "the API server is told whom to trust")
    secret = release.get("secret", "cleave-webhook", HOME)
    assert base64.b64decode(secret["data"]["tls.crt"]).startswith(b"-----BEGIN CERTIFICATE")


def test_what_cel_cannot_say_is_refused_in_words(release: Cluster, namespace: str) -> None:
    uneven = {"manual": [{"role": "mixed", "parallelism": {"tensor": 3}}]}
    with pytest.raises(CommandError) as error:
        release.apply(deployment(placement=uneven), namespace=namespace)
    assert (
        "spec.placement.manual[0].parallelism: opt-13b: 40 attention heads cannot be shared by 3"
        in error.value.text
    )


def test_what_todays_nodes_lack_is_a_warning(release: Cluster, namespace: str) -> None:
    if release.nodes is None:
        pytest.skip("needs nodes with GPUs")
    invalid = deployment(placement={"manual": [{"role": "mixed", "gpu": "B200-SXM-180GB"}]})
    command = ("apply", "-n", namespace, "-f", "-", "--dry-run=server", "-o", "name")
    assert "asked" in release.kubectl(*command, input=yaml.safe_dump(invalid))
    with pytest.raises(CommandError) as error:
        release.kubectl(*command, "--warnings-as-errors", input=yaml.safe_dump(invalid))
    assert "manual[0].gpu: no node has B200-SXM-180GB now, there is" in error.value.text


def test_the_operators_account_may_do_what_its_roles_say_and_no_more(release: Cluster) -> None:
    account = release.control_plane.service_account(HOME, "cleave-operator")

    def may(verb: str, what: str, *where: str) -> bool:
        try:
            said = release.kubectl("auth", "can-i", verb, what, *where, kubeconfig=account)
        except CommandError as error:
            said = error.text
        return said.strip().splitlines()[-1] == "yes"

    default = ("-n", "default")
    assert may("create", "pods", *default)
    assert may("patch", "llmdeployments.cleave.dev", "--subresource=status", *default)
    assert may("list", "nodes")
    assert may("get", "secret/cleave-webhook", "-n", HOME)
    assert not may("get", "secrets", *default)
    assert not may("get", "secrets", "-n", HOME)
    assert not may("create", "secrets", "-n", HOME)
    assert not may("create", "clusterroles.rbac.authorization.k8s.io")
    assert not may("bind", "clusterrole/cluster-admin")
    assert not may("escalate", "roles.rbac.authorization.k8s.io", *default)
    assert not may("create", "pods", "--subresource=exec", *default)
    assert not may("delete", "nodes")
    assert not may("patch", "validatingwebhookconfiguration/other")


PRIVILEGED = {"privileged": True}


@pytest.mark.parametrize("kind", ["Pod", "Deployment"])
@pytest.mark.parametrize(
    ("metadata", "spec", "refusal"),
    [
        ({"namespace": "kube-system"}, {}, "nothing in namespaces of Kubernetes"),
        ({"labels": {}}, {}, "only objects with the label cleave.dev/deployment"),
        ({}, {"hostPID": True}, "share no process or IPC namespace"),
        ({}, {"securityContext": PRIVILEGED}, "are not privileged"),
        (
            *({}, {"initContainers": [{"name": "i", "image": "x", "securityContext": PRIVILEGED}]}),
            "are not privileged",
        ),
        ({}, {"serviceAccountName": "admin"}, "run as the service account of their deployment"),
    ],
)
def test_the_api_server_refuses_what_the_operator_should_never_write(
    release: Cluster, namespace: str, kind: str, metadata: dict, spec: dict, refusal: str
) -> None:
    account = release.control_plane.service_account(HOME, "cleave-operator")
    labels = {"cleave.dev/deployment": "chat"}
    context = spec.get("securityContext", {})
    container = {"name": "c", "image": "x", "securityContext": context}
    spec = {name: value for name, value in spec.items() if name != "securityContext"}
    spec = {"containers": [container], "serviceAccountName": "chat-workers-0123abcd", **spec}
    written = {
        "apiVersion": "v1" if kind == "Pod" else "apps/v1",
        "kind": kind,
        "metadata": {"name": "p", "namespace": namespace, "labels": labels, **metadata},
        "spec": spec,
    }
    if kind == "Deployment":
        template = {"metadata": {"labels": labels}, "spec": spec}
        written["spec"] = {"selector": {"matchLabels": labels}, "template": template}
    command = ("create", "--dry-run=server", "-f", "-")

    def read_refusal() -> str:
        try:
            release.kubectl(*command, input=yaml.safe_dump(written), kubeconfig=account)
        except CommandError as error:
            return error.text if refusal in error.text else ""
        return ""

    # The API server refuses a pod earlier if its account does not exist.
    home, name = written["metadata"]["namespace"], spec["serviceAccountName"]
    release.kubectl("create", "serviceaccount", name, "-n", home)
    try:
        # The API server takes a moment until it applies new policies.
        wait_until(read_refusal, 120, f"refused: {refusal}")
    finally:
        release.kubectl("delete", "serviceaccount", name, "-n", home)


def test_people_who_may_edit_a_namespace_may_serve_models_in_it(
    release: Cluster, namespace: str
) -> None:
    editor = release.control_plane.service_account(namespace, "editor")
    release.kubectl(
        *("create", "rolebinding", "editor", "--clusterrole=edit", "-n", namespace),
        f"--serviceaccount={namespace}:editor",
    )

    def read_revision() -> str:
        return release.kubectl(
            "auth", "can-i", "create", "llmdeployments", "-n", namespace, kubeconfig=editor
        )

    # The roles are put together by a controller, a moment after the chart was installed.
    assert wait_until(read_revision, 120, "an editor may create deployments").strip() == "yes"


def test_an_upgrade_keeps_the_certificate_and_brings_the_crds_up_to_date(
    release: Cluster, tmp_path: Path
) -> None:
    before = wait_until(lambda: bundle(release), 120, "the API server is told whom to trust")
    older = tmp_path / "cleave"
    shutil.copytree(CHART, older)
    definition = older / "files" / "crds" / f"{RETAINED_CRDS[0]}.yaml"
    definition.write_text(definition.read_text().replace("name: Reason", "name: Why"))
    helm(release, "upgrade", chart=older)
    assert "Why" in columns(release)
    helm(release, "upgrade", "--set", "operator.podAnnotations.touched=yes")
    assert "Why" not in columns(release)
    assert "Reason" in columns(release)
    assert bundle(release) == before


def columns(cluster: Cluster) -> list[str]:
    """Of `kubectl get llmdeployments`."""
    version = cluster.get("crd", RETAINED_CRDS[0])["spec"]["versions"][0]
    return [each["name"] for each in version["additionalPrinterColumns"]]


def test_helm_test_finds_the_installation_in_order_and_leaves_nothing(release: Cluster) -> None:
    said = release.helm("test", "cleave", "-n", HOME, "--timeout", "2m", timeout_s=150)
    assert "Failed" not in said
    assert release.list("pods", HOME, "app.kubernetes.io/component=test") == []


def test_operators_that_are_away_hold_up_no_deletion(release: Cluster, namespace: str) -> None:
    resource = deployment(engine={"type": "Emulated"})
    release.apply(resource, namespace=namespace)
    wait_until(
        lambda: release.get("llmd", "asked", namespace)["metadata"].get("finalizers"),
        120,
        "the operator has seen the deployment",
    )
    operators(release, 0)
    try:
        with pytest.raises(CommandError, match=r"validate\.cleave\.dev"):
            release.apply(deployment(paused=True), namespace=namespace)
        release.kubectl("delete", "llmd", "asked", "-n", namespace, "--wait=false")
        nothing = json.dumps({"metadata": {"finalizers": None}})
        release.kubectl("patch", "llmd", "asked", "-n", namespace, "--type=merge", "-p", nothing)
        assert release.get("llmd", "asked", namespace) is None
    finally:
        operators(release, 2)


def test_the_plain_manifests_install_too(release: Cluster) -> None:
    manifests = REPOSITORY / "manifests"
    said = release.kubectl("apply", "--server-side", "--force-conflicts", "--dry-run=server", "-f",
                           str(REPOSITORY / "crds"))  # fmt: skip
    assert all(name in said for name in RETAINED_CRDS)
    documents = list(yaml.safe_load_all((manifests / "cleave.yaml").read_text()))
    for each in documents:
        # A dry run makes no namespace for what follows.
        if each["metadata"].get("namespace"):
            each["metadata"]["namespace"] = HOME
    release.kubectl("apply", "--server-side", "--force-conflicts", "--dry-run=server", "-f", "-",
                    input=yaml.safe_dump_all(documents))  # fmt: skip


def test_an_operator_of_one_namespace_serves_it_with_rights_there_alone(
    release: Cluster, namespace: str
) -> None:
    helm(release, "upgrade", "--set", f"operator.namespaces={{{namespace}}}")
    try:
        account = release.control_plane.service_account(HOME, "cleave-operator")
        with pytest.raises(CommandError, match="forbidden"):
            release.kubectl("get", "pods", "-n", "default", kubeconfig=account)
        release.apply(deployment(engine={"type": "Emulated"}), namespace=namespace)
        release.kubectl(
            *("wait", "llmd/asked", "--for=condition=Ready", "-n", namespace),
            f"--timeout={READY_S}s",
            timeout_s=READY_S + 10,
        )
        release.kubectl("delete", "llmd", "asked", "-n", namespace, "--timeout=110s")
    finally:
        helm(release, "upgrade")


def test_an_uninstall_leaves_the_crds_and_a_later_install_takes_them_again(
    release: Cluster, namespace: str
) -> None:
    release.apply(deployment(paused=True), namespace=namespace)
    with pytest.raises(CommandError, match="uninstall-guard"):
        release.helm("uninstall", "cleave", "-n", HOME, "--wait", "--timeout", "2m")
    assert release.list("deployment", HOME), "nothing was removed"
    (guard,) = (pod for pod in release.list("pods", HOME) if "uninstall" in pod["metadata"]["name"])
    (rollback,) = guard["spec"]["containers"][0]["args"]
    release.helm(*shlex.split(rollback.partition("=")[2])[1:])
    helm(release, "upgrade")
    release.helm("uninstall", "cleave", "-n", HOME, "--wait", "--timeout", "2m", "--no-hooks")
    left = json.loads(release.kubectl(
        "get", "clusterrole,clusterrolebinding,validatingwebhookconfiguration", "-o", "json",
        "-l", "app.kubernetes.io/name=cleave",
    ))  # fmt: skip
    assert left["items"] == []
    assert release.get("secret", "cleave-webhook", HOME) is None
    assert release.get("llmd", "asked", namespace)["spec"]["paused"] is True
    helm(release, "install")
    assert release.get("llmd", "asked", namespace) is not None
    release.kubectl("delete", "llmd", "asked", "-n", namespace, "--timeout=110s")
    release.helm("uninstall", "cleave", "-n", HOME, "--wait", "--timeout", "2m")
    helm(release, "install")
