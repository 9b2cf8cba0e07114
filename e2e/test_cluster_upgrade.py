"""From the previous version to this one and back, under load, as docs/operate.md says."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cleave.distribution import get_version

from e2e.cluster.closed_loop_load import Load
from e2e.cluster.cluster import Cluster, CommandError, wait_until
from e2e.test_cluster_operator import (
    CHART,
    CHAT,
    SYSTEM,
    Chat,
    installation,
    is_pod_ready,
    read_log,
)
from tests.support.previous_version import VERSION, PreviousVersion, extract

pytestmark = pytest.mark.timeout(900)

MOVED_S = 240
CRDS = ("llmdeployments.cleave.dev", "instancepools.cleave.dev")
Versions = dict[str, frozenset[str]]
"""Versions of ready pods, by component."""


@pytest.fixture
def previous(cluster: Cluster, tmp_path: Path) -> PreviousVersion:
    if cluster.nodes is None:
        pytest.skip("needs nodes that run pods as processes")
    found = extract(tmp_path)
    cluster.nodes.install(VERSION, found.sources)
    return found


def read_versions(chat: Chat) -> Versions:
    pods = chat.cluster.list("pods", SYSTEM) + chat.cluster.list("pods", chat.namespace)
    versions: dict[str, set[str]] = {}
    for pod in filter(is_pod_ready, pods):
        labels = pod["metadata"]["labels"]
        component = labels.get("cleave.dev/component", "operator")
        tag = pod["spec"]["containers"][0]["image"].rpartition(":")[2]
        versions.setdefault(component, set()).add(tag)
    return {component: frozenset(tags) for component, tags in versions.items()}


def read_crds(cluster: Cluster) -> list[object]:
    """Releases and fields."""
    crds = [cluster.get("crd", name) for name in CRDS]
    return [
        (crd["metadata"]["annotations"]["cleave.dev/release"], crd["spec"]["versions"])
        for crd in crds
    ]


def move(chat: Chat, load: Load, version: str, chart: Path, *args: str) -> list[Versions]:
    """Upgrade the release to a chart and wait until all pods are of its version; the states on the
    way."""
    seen: list[Versions] = []
    everything = dict.fromkeys(("operator", "gateway", "worker"), frozenset({version}))

    def has_moved() -> bool:
        versions = read_versions(chat)
        if not seen or versions != seen[-1]:
            seen.append(versions)
        return versions == everything and chat.is_ready()

    began, before = time.monotonic(), load.answered
    chat.cluster.helm(
        *("upgrade", "cleave", str(chart), "-n", SYSTEM, "--reset-then-reuse-values", *args),
    )
    try:
        wait_until(has_moved, MOVED_S, f"everything is {version}")
    except AssertionError as error:
        raise AssertionError(
            f"{error}\n{seen}\n{read_log(chat.cluster, chat.namespace)}"
        ) from error
    taken_s, answered = time.monotonic() - began, load.answered - before
    print(f"to {version} in {taken_s:.0f} s: {answered} answers, {len(load.failures)} failures")
    goes_on = load.answered + 20
    wait_until(lambda: load.answered > goes_on, 60, f"{version} answers")
    return seen


def has(seen: list[Versions], rule: Callable[[Versions], bool]) -> bool:
    return any(rule(versions) for versions in seen)


def is_mixed(versions: Versions, gateway: str, worker: str) -> bool:
    """Whether gateways of one version and workers of another are ready."""
    # At a look there may be none of a kind.
    gateways, workers = (versions.get(kind, frozenset()) for kind in ("gateway", "worker"))
    return gateway in gateways and worker in workers


def test_an_upgrade_and_the_way_back_lose_no_request(
    cluster: Cluster, namespace: str, previous: PreviousVersion
) -> None:
    present = get_version()
    with installation(cluster, chart=previous.chart):
        chat = Chat(cluster, namespace)
        cluster.kubectl("apply", "-n", namespace, "-f", "-", input=CHAT)
        try:
            chat.until_ready()
            older_crds = read_crds(cluster)
            with Load(chat.address, "chat") as load:
                wait_until(lambda: load.answered > 20, 60, "the load is on")
                assert set(read_versions(chat).values()) == {frozenset({VERSION})}
                up = move(chat, load, present, CHART)
                newer_crds = read_crds(cluster)
                with pytest.raises(CommandError, match="CRDs of Cleave never go back"):
                    cluster.helm("rollback", "cleave", "1", "-n", SYSTEM)
                assert read_crds(cluster) == newer_crds
                back = move(chat, load, VERSION, previous.chart, "--set", "crds.enabled=false")
                again = move(chat, load, present, CHART, "--set", "crds.enabled=true")
            assert load.failures == []
            # Each pair of versions was at work.
            both = frozenset({VERSION, present})
            for seen in (up, back):
                assert has(seen, lambda v: v.get("worker") == both)
                assert has(seen, lambda v: is_mixed(v, VERSION, present)) or (
                    has(seen, lambda v: is_mixed(v, present, VERSION))
                )
            assert again[-1] == up[-1]
            assert newer_crds != older_crds
            assert read_crds(cluster) == newer_crds
        finally:
            cluster.kubectl("delete", "llmd", "--all", "-n", namespace, timeout_s=180)
