"""What the chart installs for Prometheus; needs helm."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from cleave.api.manifest import validate
from cleave.api.role import MAX_POD_ENGINES
from cleave.manifests.labels import ENGINE_PORT, get_agent_port_name
from cleave.manifests.worker import build_worker_pod

from tests.packaging.conftest import find
from tests.support.built_pools import build_pools

ROOT = Path(__file__).parent.parent.parent


def test_pod_monitors_find_operators_gateways_and_engines(render) -> None:
    monitors = find(render("metrics.podMonitor.enabled=true"), "PodMonitor")
    selectors = [each["spec"]["selector"]["matchLabels"] for each in monitors]
    assert {"cleave.dev/component": "gateway"} in selectors
    assert {"cleave.dev/component": "worker"} in selectors
    assert len(monitors) == 3


def test_the_engines_that_a_pod_monitor_finds_have_the_port_that_it_names(render) -> None:
    deployment = validate(
        {
            "apiVersion": "cleave.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": "chat"},
            "spec": {"model": "a/b", "slo": {"ttftMs": 1, "tpotMs": 1}},
        }
    )
    (engines,) = (
        each
        for each in find(render("metrics.podMonitor.enabled=true"), "PodMonitor")
        if each["metadata"]["name"] == "cleave-engines"
    )
    pod = build_worker_pod(build_pools(deployment)[0], 0)
    assert engines["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    endpoint, *others = engines["spec"]["podMetricsEndpoints"]
    # Further engines of cells in one pod.
    names = [get_agent_port_name(number) for number in range(1, MAX_POD_ENGINES)]
    assert [each["port"] for each in others] == [n.replace("agent", "engine") for n in names]
    (container,) = pod["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    listens = container["command"][container["command"].index("--engine-port") + 1]
    assert listens == str(ports[endpoint["port"]])


def test_the_guides_policy_lets_prometheus_reach_the_port_of_engines_only(render) -> None:
    guide = (ROOT / "docs" / "observe.md").read_text()
    (text,) = re.findall(r"```yaml\n(apiVersion: networking[^`]*)```", guide)
    spec = yaml.safe_load(text)["spec"]
    (engines,) = (
        each
        for each in find(render("metrics.podMonitor.enabled=true"), "PodMonitor")
        if each["metadata"]["name"] == "cleave-engines"
    )
    assert spec["podSelector"] == engines["spec"]["selector"]
    (rule,) = spec["ingress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": ENGINE_PORT}]
    assert {"namespaceSelector", "podSelector"} == set(rule["from"][0])


def test_monitors_and_rules_take_the_options_of_the_prometheus_operator(render, tmp_path) -> None:
    relabelings = [{"action": "labeldrop", "regex": "pod"}]
    monitor = {
        "enabled": True,
        "scrapeTimeout": "7s",
        "namespace": "monitoring",
        "relabelings": relabelings,
        "metricRelabelings": relabelings,
    }
    rules = {"enabled": True, "namespace": "monitoring"}
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump({"metrics": {"podMonitor": monitor, "rules": rules}}))
    manifests = render(files=[file])
    for each in find(manifests, "PodMonitor") + find(manifests, "PrometheusRule"):
        assert each["metadata"]["namespace"] == "monitoring"
    monitors = {each["metadata"]["name"]: each["spec"] for each in find(manifests, "PodMonitor")}
    for spec in monitors.values():
        for endpoint in spec["podMetricsEndpoints"]:
            assert endpoint["scrapeTimeout"] == "7s"
            assert endpoint["relabelings"] == endpoint["metricRelabelings"] == relabelings
    selected = monitors["cleave-operator"]["namespaceSelector"]["matchNames"]
    assert selected == ["cleave-system"], "a PodMonitor selects pods of its own namespace otherwise"


def test_every_alert_has_a_runbook(render) -> None:
    runbooks = (ROOT / "docs" / "runbooks.md").read_text()
    headings = re.findall(r"(?m)^## (\w+)$", runbooks)
    (rules,) = find(
        render("metrics.rules.enabled=true", "metrics.rules.runbooks=https://x/runbooks"),
        "PrometheusRule",
    )
    alerts = {
        rule["alert"]: rule["annotations"]["runbook_url"]
        for group in rules["spec"]["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    assert alerts == {name: f"https://x/runbooks#{name.lower()}" for name in alerts}
    assert sorted(headings) == sorted(alerts), "a section for each alert, and no other"
    schema = json.loads((ROOT / "charts/cleave/values.schema.json").read_text())
    assert schema["definitions"]["alert"]["enum"] == sorted(alerts), "values may name each alert"


def test_alerts_are_left_out_or_get_another_severity_by_name(render) -> None:
    def list_severities(*values: str) -> dict[str, str]:
        (found,) = find(render("metrics.rules.enabled=true", *values), "PrometheusRule")
        rules = [rule for group in found["spec"]["groups"] for rule in group["rules"]]
        return {rule["alert"]: rule["labels"]["severity"] for rule in rules if "alert" in rule}

    usual = list_severities()
    changed = list_severities(
        "metrics.rules.disabled={CleavePoolsFlap,CleavePlanDrifts}",
        "metrics.rules.severities.CleaveSloBurns=info",
    )
    assert usual.keys() - changed.keys() == {"CleavePoolsFlap", "CleavePlanDrifts"}
    assert {name for name in changed if changed[name] != usual[name]} == {"CleaveSloBurns"}
    assert changed["CleaveSloBurns"] == "info"


def test_a_group_without_rules_is_left_out(render) -> None:
    def list_groups(*values: str) -> dict[str, list[dict]]:
        (found,) = find(render("metrics.rules.enabled=true", *values), "PrometheusRule")
        return {group["name"]: group["rules"] for group in found["spec"]["groups"]}

    usual = list_groups()
    name, rules = next(
        (name, rules) for name, rules in usual.items() if all("alert" in rule for rule in rules)
    )
    alerts = ",".join(rule["alert"] for rule in rules)
    rest = list_groups(f"metrics.rules.disabled={{{alerts}}}")
    assert rest == {each: usual[each] for each in usual if each != name}


def print_notes(helm: str, chart: Path, folder: Path, values: str) -> str:
    output = subprocess.run(
        [helm, "install", "cleave", str(chart), "--dry-run=client", "--set", values],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"HOME": str(folder), "KUBECONFIG": "/dev/null"},
    ).stdout
    notes = output.partition("NOTES:")[2]
    assert notes
    return notes


@pytest.mark.parametrize("isolated", ["true", "false"])
def test_enabled_pod_monitors_print_a_note_on_worker_network_policies(
    helm, chart, tmp_path, isolated: str
) -> None:
    values = f"metrics.podMonitor.enabled=true,networkPolicy.workers={isolated}"
    notes = print_notes(helm, chart, tmp_path, values)
    assert ("Prometheus does not reach engines yet" in notes) is (isolated == "true")


@pytest.mark.parametrize(
    ("values", "is_closed"),
    [
        ("metrics.podMonitor.enabled=true", True),
        ("metrics.podMonitor.enabled=true,networkPolicy.scraperNamespaces={monitoring}", False),
        (
            "metrics.podMonitor.enabled=true,networkPolicy.workers=false,networkPolicy.enabled=false",
            False,
        ),
        ("metrics.podMonitor.enabled=false", False),
    ],
)
def test_enabled_pod_monitors_print_a_note_until_a_namespace_may_scrape(
    helm, chart, tmp_path, values: str, is_closed: bool
) -> None:
    notes = print_notes(helm, chart, tmp_path, values)
    assert ("name its namespace in networkPolicy.scraperNamespaces" in notes) is is_closed
