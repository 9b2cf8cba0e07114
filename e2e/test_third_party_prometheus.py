"""The real Prometheus operator takes the chart's monitors and rules, and the configuration that it
generates lets a real Prometheus find, scrape and judge a deployment.

The operator also creates a StatefulSet for Prometheus, whose image test nodes cannot run; the test
starts Prometheus with the generated files in its place.
"""

import base64
import gzip
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.closed_loop_load import Load
from e2e.cluster.cluster import Cluster, wait_until
from e2e.support import third_party
from e2e.support.prometheus import Prometheus, configured, find_programs
from e2e.test_cluster_operator import CHART, SYSTEM, Chat, deployed, installation
from tests.support.ports import find_free_port

pytestmark = pytest.mark.timeout(400)

WAIT_S = 60
MONITORING = "monitoring"
LABELS = {"release": "monitoring"}
"""What the Prometheus of kube-prometheus-stack, installed under that name, selects by."""
RELOADED = {"POD_NAME": "prometheus-main-0", "SHARD": "0"}
"""What the config-reloader beside Prometheus puts in from its environment."""
TARGETS = {"operator": 2, "gateways": 2, "engines": 3}
PATIENT = """
apiVersion: cleave.dev/v1alpha1
kind: LLMDeployment
metadata: {name: chat}
spec:
  model: {source: facebook/opt-13b, servedName: chat, maxModelLen: 8192}
  slo: {ttftMs: 60000, tpotMs: 10000}
  engine: {type: Emulated, emulated: {timeScale: 0.2}}
  pools: {flipping: "Off"}
  placement:
    manual:
      - {role: prefill, replicas: 1}
      - {role: decode, replicas: 2}
"""
"""Targets that a busy machine meets, too."""


@dataclass(frozen=True)
class Stack:
    """A deployment under load, the Prometheus operator, and a Prometheus as that configures it."""

    chat: Chat
    prometheus: Prometheus
    metrics_url: str
    rules: dict[str, Any]
    """Rules that the chart has, as one file."""

    def managed(self, kind: str, state: str) -> float:
        """Resources of a kind that the operator has selected or rejected."""
        with urllib.request.urlopen(self.metrics_url, timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        parts = ("prometheus_operator_managed_resources{", f'"{kind}"', f'"{state}"')
        (found,) = [line for line in lines if all(part in line for part in parts)]
        return float(found.split()[-1])

    def targets(self) -> dict[str, list[str]]:
        """ "up" or the last error of the targets, by the last word of their PodMonitor's name."""
        found: dict[str, list[str]] = {}
        for target in self.prometheus.targets():
            monitor = target["scrapePool"].split("/")[2]
            found.setdefault(monitor.removeprefix("cleave-"), []).append(
                "up" if target["health"] == "up" else target["lastError"] or target["health"]
            )
        return found


@pytest.fixture(scope="module")
def stack(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("prometheus-operator")
    built = third_party.find("prometheus-operator")
    programs = find_programs(build=False)
    if programs is None:
        pytest.skip("Prometheus is not here; scripts/prometheus builds it")
    if cluster.control_plane is None or cluster.nodes is None:
        pytest.skip("needs a control plane and process nodes of its own")
    third_party.apply_crds(cluster, built / "manifests" / "prometheus-operator-crd")
    address = f"127.0.0.1:{find_free_port()}"
    pki = cluster.control_plane.pki
    line = [
        built / "operator",
        f"--apiserver={cluster.control_plane.url}",
        f"--ca-file={pki / 'ca.crt'}",
        f"--cert-file={pki / 'admin.crt'}",
        f"--key-file={pki / 'admin.key'}",
        f"--web.listen-address={address}",
    ]
    labels = [f"--set=metrics.{part}.labels.release=monitoring" for part in ("podMonitor", "rules")]
    values = (
        "--set=metrics.podMonitor.enabled=true",
        "--set=metrics.podMonitor.interval=1s",
        "--set=metrics.rules.enabled=true",
        *labels,
    )
    rendered = cluster.helm("template", "cleave", str(CHART), *values)
    (rule,) = [d for d in yaml.safe_load_all(rendered) if d and d["kind"] == "PrometheusRule"]
    with (
        third_party.running(line, folder / "operator.log"),
        installation(cluster, *values),
        cluster.lend_namespace() as namespace,
        deployed(cluster, namespace, PATIENT) as chat,
    ):
        cluster.kubectl("create", "namespace", MONITORING)
        cluster.apply(build_prometheus(cluster), namespace=MONITORING)
        config = wait_until(
            lambda: generated(cluster, folder), WAIT_S, "the operator generates a configuration"
        )
        with (
            configured(programs, folder, config) as prometheus,
            Load(chat.address, "chat"),
        ):
            found = Stack(chat, prometheus, f"http://{address}/metrics", rule["spec"])
            yield found
        cluster.kubectl("delete", "namespace", MONITORING, "--wait=false")


def build_prometheus(cluster: Cluster) -> dict[str, Any]:
    """A Prometheus as kube-prometheus-stack writes it: it selects by labels, in all namespaces."""
    assert cluster.control_plane is not None
    pki = cluster.control_plane.pki
    by_labels = {"matchLabels": LABELS}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "Prometheus",
        "metadata": {"name": "main"},
        "spec": {
            "version": "v3.5.0",
            "evaluationInterval": "1s",
            "podMonitorSelector": by_labels,
            "podMonitorNamespaceSelector": {},
            "ruleSelector": by_labels,
            "ruleNamespaceSelector": {},
            # In place of the account of a pod.
            "apiserverConfig": {
                "host": cluster.control_plane.url,
                "tlsConfig": {
                    "caFile": str(pki / "ca.crt"),
                    "certFile": str(pki / "admin.crt"),
                    "keyFile": str(pki / "admin.key"),
                },
            },
        },
    }


def generated(cluster: Cluster, folder: Path) -> dict[str, Any] | None:
    """The operator's configuration once it has all monitors and rules; rules go to `folder`."""
    secret = cluster.get("secret", "prometheus-main", MONITORING) or {}
    packed = (secret.get("data") or {}).get("prometheus.yaml.gz")
    rules = cluster.get("configmap", "prometheus-main-rulefiles-0", MONITORING) or {}
    if packed is None or not rules.get("data"):
        return None
    text = gzip.decompress(base64.b64decode(packed)).decode()
    for name, value in RELOADED.items():
        text = text.replace(f"$({name})", value)
    config = dict(yaml.safe_load(text))
    if len({job["job_name"].split("/")[2] for job in config["scrape_configs"]}) < len(TARGETS):
        return None
    for name, text in rules["data"].items():
        (folder / name).write_text(text)
    return config | {"rule_files": list(rules["data"])}


def test_every_monitor_finds_its_pods_and_all_are_scraped(stack: Stack) -> None:
    expected = {name: ["up"] * count for name, count in TARGETS.items()}
    try:
        wait_until(lambda: stack.targets() == expected, WAIT_S, "all targets are up")
    except AssertionError as error:
        raise AssertionError(f"{error}: {stack.targets()}") from error
    found = stack.prometheus.ask("cleave_gateway_requests_total")
    assert {sample["metric"]["namespace"] for sample in found} == {stack.chat.namespace}
    assert stack.prometheus.ask("sum(rate(vllm:num_requests_running[1m]))")


def test_rules_load_have_values_and_nothing_fires(stack: Stack) -> None:
    rules = {
        rule.get("record") or rule["alert"]
        for group in stack.rules["groups"]
        for rule in group["rules"]
    }
    records = {r["record"] for g in stack.rules["groups"] for r in g["rules"] if "record" in r}
    assert {rule["name"] for rule in stack.prometheus.rules()} == rules
    wait_until(
        lambda: all(stack.prometheus.ask(name) for name in records), WAIT_S, "records have values"
    )
    loaded = stack.prometheus.rules()
    assert {rule["health"] for rule in loaded} == {"ok"}
    assert {rule["name"] for rule in loaded if rule.get("state") in ("pending", "firing")} == set()


def test_the_operator_rejects_nothing_and_reports_no_fault(stack: Stack) -> None:
    for kind, count in (("PodMonitor", len(TARGETS)), ("PrometheusRule", 1)):
        assert stack.managed(kind, "selected") == count
        assert stack.managed(kind, "rejected") == 0
    events = stack.chat.cluster.kubectl("get", "events", "-n", SYSTEM)
    assert "InvalidConfiguration" not in events
