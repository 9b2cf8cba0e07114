"""The real KEDA scales pools by Cleave's metrics, with ScaledObjects of examples/autoscaling."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.closed_loop_load import Load
from e2e.cluster.cluster import Cluster, wait_until
from e2e.support import third_party
from e2e.support.prometheus import ROOT, Prometheus, find_programs, pod_jobs, running
from e2e.test_cluster_operator import CHAT, READY_S, Chat, deployed, installation, read_log

pytestmark = pytest.mark.timeout(500)

WAIT_S = 90
HOME = "keda"
TOKENS_PER_S = 20
"""Of prompts, that the tests let one prefill instance have; the example's number is a GPU's."""


@pytest.fixture(scope="module")
def with_keda(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with KEDA's operator and its metrics server, and with Cleave."""
    built, folder = third_party.find("keda"), tmp_path_factory.mktemp("keda")
    if cluster.control_plane is None or cluster.nodes is None:
        pytest.skip("needs a control plane and process nodes of its own")
    install(cluster, built / "manifests" / "config" / "minimal")
    account = cluster.control_plane.service_account(HOME, "keda-operator")
    env = {
        "KUBECONFIG": str(account),
        "POD_NAMESPACE": HOME,
        "KEDA_CLUSTER_OBJECT_NAMESPACE": HOME,
        "WATCH_NAMESPACE": "",
    }
    address, certificates = third_party.ADDRESS, folder / "certificates"
    certificates.mkdir()
    operator = [
        *(built / "operator", "--enable-cert-rotation", f"--cert-dir={certificates}"),
        *("--enable-webhook-patching=false", f"--metrics-bind-address={address}:8080"),
        *(f"--health-probe-bind-address={address}:8081",),
        *(f"--metrics-service-bind-address={address}:9666",),
    ]
    adapter = [
        *(built / "adapter", f"--bind-address={address}", "--secure-port=6443", "--port=8082"),
        *(f"--client-ca-file={certificates / 'ca.crt'}",),
        *(f"--tls-cert-file={certificates / 'tls.crt'}",),
        *(f"--tls-private-key-file={certificates / 'tls.key'}", f"--cert-dir={certificates}"),
        *(f"--metrics-service-address={address}:9666",),
        "--metrics-service-grpc-authority=keda-operator.keda.svc",
        *(
            f"--{what}-kubeconfig={account}"
            for what in ("lister", "authentication", "authorization")
        ),
    ]
    with third_party.mounted(cluster, HOME, "kedaorg-certs", certificates):
        with third_party.running(operator, folder / "operator.log", env):
            wait_until((certificates / "tls.crt").exists, WAIT_S, "KEDA issues its certificate")
        # It ends with that, and a kubelet starts it again.
        serving = third_party.running(operator, folder / "operator.log", env)
        third_party.lead_service(cluster, HOME, "keda-metrics-apiserver", {"https": 6443})
        with (
            serving,
            third_party.running(adapter, folder / "adapter.log", env),
            installation(cluster),
        ):
            cluster.kubectl(
                "wait", "--for=condition=Available", "--timeout=90s",
                "apiservice/v1beta1.external.metrics.k8s.io",
            )  # fmt: skip
            yield cluster
    cluster.kubectl("delete", "apiservice", "v1beta1.external.metrics.k8s.io")


def install(cluster: Cluster, folder: Path) -> None:
    """What KEDA's own manifests have, but for pods."""
    found = yaml.safe_load_all(cluster.kubectl("kustomize", str(folder)))
    kept = yaml.safe_dump_all(each for each in found if each["kind"] != "Deployment")
    cluster.kubectl("apply", "--server-side", "-f", "-", input=kept)
    cluster.kubectl("wait", "--for=condition=Established", "crd/scaledobjects.keda.sh")


def scaled_objects(chat: Chat, prometheus: Prometheus) -> list[dict[str, Any]]:
    """Those of the example, changed as a user changes them: where, and by how much."""
    text = (ROOT / "examples" / "autoscaling" / "keda.yaml").read_text()
    text = text.replace("http://prometheus.monitoring:9090", prometheus.url)
    text = text.replace('namespace="default"', f'namespace="{chat.namespace}"')
    text = text.replace('"12000"', f'"{TOKENS_PER_S}"').replace("[2m]", "[20s]")
    return list(yaml.safe_load_all(text))


def test_pools_have_the_least_number_and_grow_with_the_load(
    with_keda: Cluster, namespace: str, tmp_path: Path
) -> None:
    programs = find_programs(build=False)
    if programs is None:
        pytest.skip("Prometheus is not here; scripts/prometheus builds it")
    jobs = pod_jobs(with_keda.kubeconfig)
    with (
        deployed(with_keda, namespace, CHAT) as chat,
        running(programs, tmp_path, jobs) as prometheus,
    ):
        for role in ("prefill", "decode"):
            owner = '{"spec":{"owner":"Autoscaler"}}'
            with_keda.kubectl(
                *("patch", f"ipool/chat-{role}", "-n", namespace, "--type=merge", "-p", owner)
            )
        try:
            with Load(chat.address, "chat", users=4, tokens=4) as load:
                wait_until(lambda: load.answered > 20, WAIT_S, "the load is on")
                with_keda.apply(*scaled_objects(chat, prometheus), namespace=namespace)
                for role in ("prefill", "decode"):
                    with_keda.kubectl(
                        *("wait", "--for=condition=Ready", f"scaledobject/chat-{role}"),
                        *("-n", namespace, "--timeout=60s"),
                    )
                wait_until(lambda: len(chat.workers("prefill")) > 1, READY_S, "prefill grows")
                wait_until(chat.is_ready, READY_S, "what has come is ready")
                assert chat.ask() == ""
            assert load.failures == []
        except AssertionError as error:
            said = with_keda.kubectl("describe", "hpa,scaledobject", "-n", namespace)
            log = read_log(with_keda, namespace)
            raise AssertionError(f"{error}\n{said}\n{log}") from error
        for role in ("prefill", "decode"):
            found = with_keda.get("hpa", f"keda-hpa-chat-{role}", namespace) or {}
            assert found["status"]["currentMetrics"], "the metric has a value"
            with_keda.kubectl("delete", f"scaledobject/chat-{role}", "-n", namespace)
