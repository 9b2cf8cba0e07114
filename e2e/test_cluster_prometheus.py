"""A real Prometheus beside a deployment: every panel and query finds data that real processes
counted, no alert fires while all is well, and those for a calamity fire in one.

tests/install and tests/gateway ask the same queries of pages made up for each alert; what they
cannot show is whether the pages are really found, scraped and labelled as the queries expect.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from cleave.manifests.labels import GATEWAY_PORT

from e2e.cluster.closed_loop_load import Load
from e2e.cluster.cluster import Cluster, wait_until
from e2e.cluster.nodes import Nodes, gpu_node
from e2e.support.prometheus import ROOT, Prometheus, find_programs, pod_jobs, running
from e2e.test_cluster_operator import CHART, SYSTEM, Chat, condition, installation
from tests.support.ports import find_free_port

pytestmark = pytest.mark.timeout(900)

WAIT_S = 180
WORKERS = "node-c"
PAGES = 7
"""Two operators, two gateways and three engines."""
PATIENT = """
apiVersion: cleave.dev/v1alpha1
kind: LLMDeployment
metadata: {name: chat}
spec:
  model: {source: facebook/opt-13b, servedName: chat, maxModelLen: 8192}
  slo: {ttftMs: 60000, tpotMs: 10000, itlP99Ms: 20000}
  engine: {type: Emulated, emulated: {timeScale: 0.2}}
  pools: {flipping: "Off"}
  template: {nodeSelector: {kubernetes.io/hostname: node-c}}
  placement:
    manual:
      - {role: prefill, replicas: 1}
      - {role: decode, replicas: 2}
"""
"""Targets that a busy machine meets, too; all workers on a node that can be lost."""
GRAFANA = {"$namespace": ".*", "$model": ".*", "$__rate_interval": "10s"}
"""What Grafana puts in for its variables, at a scrape a second."""
MANUAL_REASON = "the placement is manual, so nothing is predicted"
EMPTY_PANELS = {
    "Shed requests": "no request is shed",
    "Failures hidden from clients": "no attempt fails",
    "KV lost": "these engines are not vLLM with connector Cleave",
    "Cached share of prompts": "the policy does not look at caches",
    "Prediction error": MANUAL_REASON,
    "Correction of the latency model": MANUAL_REASON,
    "P90 TTFT, predicted and observed": "nothing is planned",
    "P90 TPOT, predicted and observed": "nothing is planned",
    "Attainment, predicted and observed": "nothing is planned",
}
"""Panels without data in a fleet that is well, and why."""
EMPTY_QUERIES = {
    "Shed, by reason and tenant",
}
"""Queries of the guide without data, for the same reasons."""
CALAMITY = {
    "CleaveNoInstanceReady",
    "CleaveManyRequestsFail",
    "CleaveRequestsFail",
    "CleaveSloBurnsFast",
    "CleaveSloBurns",
    "CleaveOperatorDoesNotLead",
}
"""What fires when the workers' node and the operator are gone while clients ask on."""


@dataclass(frozen=True)
class Watched:
    """A deployment that serves, and the Prometheus that watches it."""

    chat: Chat
    prometheus: Prometheus
    load: Load
    folder: Path

    def ask(self, query: str) -> list[dict[str, Any]]:
        for name, value in GRAFANA.items():
            query = query.replace(name, value)
        return self.prometheus.ask(query)

    def firing(self) -> set[str]:
        rules = self.prometheus.rules()
        return {rule["name"] for rule in rules if rule.get("state") == "firing"}


@pytest.fixture(scope="module")
def port() -> int:
    """Of Prometheus, which starts after the operator that reads it."""
    return find_free_port()


@pytest.fixture(scope="module")
def installed(cluster: Cluster, port: int) -> Iterator[Cluster]:
    """A cluster with an operator that takes traffic from Prometheus."""
    with installation(cluster, "--set", f"planning.prometheus=http://127.0.0.1:{port}"):
        yield cluster


@pytest.fixture(scope="module")
def nodes(installed: Cluster) -> Iterator[Nodes]:
    """Those of the cluster, one for workers among them."""
    if installed.nodes is None:
        pytest.skip("needs nodes that a test may break")
    installed.nodes.add(gpu_node(WORKERS))
    yield installed.nodes
    installed.nodes.lose(WORKERS)
    installed.kubectl("delete", "node", WORKERS)


@pytest.fixture(scope="module")
def programs() -> Path:
    found = find_programs(build=False)
    if found is None:
        pytest.skip("Prometheus is not here; scripts/prometheus builds it")
    return found


@pytest.fixture(scope="module")
def rules(cluster: Cluster) -> dict[str, Any]:
    """The chart's, as a file of rules."""
    rendered = cluster.helm("template", "cleave", str(CHART), "--set", "metrics.rules.enabled=true")
    found = [each for each in yaml.safe_load_all(rendered) if each]
    (rule,) = [each for each in found if each["kind"] == "PrometheusRule"]
    return dict(rule["spec"])


@pytest.fixture(scope="module")
def watched(
    installed: Cluster,
    nodes: Nodes,
    programs: Path,
    rules: dict[str, Any],
    port: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Watched]:
    """A deployment under load, scraped often enough for every rate; nothing has gone wrong."""
    folder = tmp_path_factory.mktemp("prometheus")
    # Each time another one: after a failure the test runs again while the last one is deleted.
    with installed.lend_namespace() as namespace:
        chat = Chat(installed, namespace)
        try:
            installed.kubectl("apply", "-n", namespace, "-f", "-", input=PATIENT)
            chat.until_ready()
            jobs, hurried_rules = pod_jobs(installed.kubeconfig), hurried(rules)
            with (
                running(programs, folder, jobs, hurried_rules, port=port) as prometheus,
                Load(gateway(chat), "chat") as load,
            ):
                found = Watched(chat, prometheus, load, folder)
                wait_until(lambda: has_history(found), WAIT_S, "all pages are scraped under load")
                yield found
        finally:
            installed.kubectl("delete", "llmd", "--all", "-n", namespace, timeout_s=180)


def test_every_panel_shows_something_of_a_fleet_that_is_well(watched: Watched) -> None:
    empty: dict[str, str] = {}

    def is_filled() -> bool:
        empty.clear()
        for file in sorted((CHART / "files" / "dashboards").glob("*.json")):
            for panel in json.loads(file.read_text())["panels"]:
                for target in panel.get("targets", ()):
                    if not watched.ask(target["expr"]) and panel["title"] not in EMPTY_PANELS:
                        empty[panel["title"]] = target["expr"]
        return not empty

    with suppress(AssertionError):
        wait_until(is_filled, WAIT_S, "every panel shows something")
    assert not empty


def test_every_query_of_the_guide_finds_what_it_is_for(watched: Watched) -> None:
    guide = (ROOT / "docs" / "observe.md").read_text()
    empty: list[str] = []
    alarming: list[str] = []

    def is_complete() -> bool:
        empty.clear()
        alarming.clear()
        for block in re.findall(r"```promql\n(.*?)```", guide, re.DOTALL):
            for part in block.strip().split("\n\n"):
                comment, *queries = part.splitlines()
                for query in queries:
                    found = watched.ask(query)
                    if "Worth an alert" in comment:
                        alarming.extend([query] if found else [])
                    elif not found and comment.removeprefix("# ") not in EMPTY_QUERIES:
                        empty.append(query)
        return not empty and not alarming

    with suppress(AssertionError):
        wait_until(is_complete, WAIT_S, "every query finds what it is for")
    assert not empty
    assert not alarming


def test_rules_load_and_fire_no_alert_while_all_is_well(
    watched: Watched, programs: Path, rules: dict[str, Any]
) -> None:
    file = watched.folder / "chart.yaml"
    file.write_text(yaml.safe_dump(rules))
    checked = subprocess.run(
        [programs / "promtool", "check", "rules", file], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    alert_rules = watched.prometheus.rules()
    assert {rule["health"] for rule in alert_rules} == {"ok"}
    records = {rule["name"] for rule in alert_rules if rule["type"] == "recording"}
    wrong: set[str] = set()

    def is_well() -> bool:
        wrong.clear()
        wrong.update(watched.firing(), (name for name in records if not watched.ask(name)))
        return not wrong

    # A minute is a second here, so a stall of seconds sets off an alert, which soon ends.
    with suppress(AssertionError):
        wait_until(is_well, WAIT_S, "every record has a value and no alert fires")
    assert not wrong, "records without a value, or alerts that fire"


def test_the_operator_takes_the_traffic_from_it(watched: Watched) -> None:
    """As clients see it, by what the operator has written at most five minutes ago."""
    chat = watched.chat
    before = chat.deployment["status"].get("observed", {}).get("at")
    wait_until(lambda: condition(chat.deployment, "PrometheusRead") == "True", WAIT_S, "it is read")

    def is_similar() -> bool:
        observed = chat.deployment["status"].get("observed", {})
        (counted,) = watched.ask("sum(rate(cleave_gateway_requests_total[1m]))")
        (tokens,) = watched.ask(
            "sum(rate(cleave_gateway_prompt_tokens_total[1m]))"
            " / sum(rate(cleave_gateway_request_prompt_tokens_count[1m]))"
        )
        return observed.get("at") != before and all(
            abs(float(own["value"][1]) / seen - 1) < 0.1
            for own, seen in (
                (counted, observed["rate"]),
                (tokens, observed["promptTokens"]["mean"]),
            )
        )

    wait_until(is_similar, 2 * WAIT_S, "status.observed is the traffic")


def test_a_calamity_sets_off_the_alerts_that_are_for_it(watched: Watched, nodes: Nodes) -> None:
    chat = watched.chat
    operator = ("deployment/cleave-operator", "-n", SYSTEM)
    chat.cluster.kubectl("scale", *operator, "--replicas=0")
    try:
        wait_until(lambda: not chat.cluster.list("pods", SYSTEM), WAIT_S, "no operator is left")
        nodes.lose(WORKERS)
        try:
            wait_until(lambda: watched.firing() == CALAMITY, WAIT_S, "alerts fire")
        except AssertionError as error:
            instances = watched.ask("cleave_gateway_instances")
            raise AssertionError(f"{error}\n{watched.firing()}\n{instances}") from error
    finally:
        chat.cluster.kubectl("delete", "node", WORKERS)
        nodes.add(gpu_node(WORKERS))
        chat.cluster.kubectl("scale", *operator, "--replicas=2")
    chat.until_ready()


def hurried(rules: dict[str, Any]) -> dict[str, Any]:
    """The same rules where a second counts as a minute."""

    def hurry(found: re.Match[str]) -> str:
        return f"{found[1]}{int(found[2]) * (60 if found[3] == 'h' else 1)}s{found[4]}"

    text = re.sub(r"(\[)(\d+)([mh])(\])", hurry, json.dumps(rules))
    return dict(json.loads(re.sub(r'("for": ")(\d+)([mh])(")', hurry, text)))


def gateway(chat: Chat) -> str:
    """Address of one by itself: the Service turns clients away while no instance is ready."""
    pods = chat.cluster.list("pods", chat.namespace, "cleave.dev/component=gateway")
    return f"{pods[0]['status']['podIP']}:{GATEWAY_PORT}"


def has_history(watched: Watched) -> bool:
    """Whether every page has been scraped twice within the panels' window, and a pair is proven."""
    counted = watched.ask("count_over_time(up[$__rate_interval]) >= 3")
    proven = watched.ask("cleave_gateway_kv_pair_bytes_per_second_min")
    return len(counted) == PAGES and watched.load.answered > 50 and bool(proven)
