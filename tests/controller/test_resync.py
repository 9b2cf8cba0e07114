"""Resync: it repairs what watches missed, and reports a watch that misses events."""

from typing import Any

from cleave.controller.cluster.cache import ResourceKey
from cleave.controller.controller import Controller
from cleave.controller.metrics import OperatorMetrics
from cleave.controller.resync import Resync
from cleave.controller.settings import OperatorSettings
from cleave.manifests.labels import Manifest

from tests.support.fake_cluster import chat

DEPLOYMENTS = "LLMDeployment"


class Lists:
    """Answers lists, two objects a page."""

    def __init__(self) -> None:
        self.items: list[Manifest] = []
        self.version = 10
        self.requests: list[tuple[str, dict[str, str]]] = []

    async def request(self, _method: str, path: str, query: dict[str, str]) -> Manifest:
        self.requests.append((path, dict(query)))
        begin = int(query.get("continue", 0))
        rest = str(begin + 2) if begin + 2 < len(self.items) else ""
        meta = {"resourceVersion": str(self.version), "continue": rest}
        return {"items": self.items[begin : begin + 2], "metadata": meta}


def named(name: str, version: int) -> Manifest:
    resource = chat()
    meta = {"name": name, "namespace": "llm", "uid": f"u-{name}", "resourceVersion": str(version)}
    return {**resource, "metadata": meta}


def setup(*names: str) -> tuple[Lists, Controller, Resync]:
    lists, controller = Lists(), Controller(OperatorSettings(), OperatorMetrics())
    lists.items = [named(name, 5) for name in names]
    resync = Resync(lists, controller, grace_s=0)  # type: ignore[arg-type]
    return lists, controller, resync


def known(controller: Controller) -> set[str]:
    return {key.name for key in controller.cache.list_resources()}


async def test_everything_is_seen_once_before_the_work_begins() -> None:
    lists, controller, resync = setup("a", "b", "c")
    await resync.fill()
    assert known(controller) == {"a", "b", "c"}
    paths = [path for path, _ in lists.requests]
    assert paths.index("/api/v1/nodes") < paths.index("/api/v1/pods")
    assert ("/api/v1/pods", "cleave.dev/component") in [
        (path, query.get("labelSelector", "")) for path, query in lists.requests
    ]


async def test_a_watch_that_keeps_up_misses_nothing() -> None:
    _, controller, resync = setup("a", "b")
    controller.on_change(named("a", 5))
    controller.on_change(named("b", 6))
    assert await resync.resync(DEPLOYMENTS) == 0
    assert resync.stale_watches == []


async def test_what_was_missed_is_put_right() -> None:
    lists, controller, resync = setup("a", "b")
    controller.on_change(named("a", 4))
    controller.on_change(named("gone", 4))
    assert await resync.resync(DEPLOYMENTS) == 3
    assert known(controller) == {"a", "b"}
    assert controller.cache.get_version("LLMDeployment", "llm", "a") == 5
    assert ResourceKey("LLMDeployment", "llm", "gone") not in controller.cache.list_resources()
    assert lists.requests


async def test_a_watch_that_misses_things_twice_is_dead_until_it_keeps_up() -> None:
    lists, _, resync = setup("a")
    await resync.resync(DEPLOYMENTS)
    assert resync.stale_watches == []
    lists.items = [named("a", 7)]
    await resync.resync(DEPLOYMENTS)
    assert resync.stale_watches == ["LLMDeployment"]
    await resync.resync(DEPLOYMENTS)
    assert resync.stale_watches == []


async def test_only_the_configured_namespaces_are_listed_and_all_nodes() -> None:
    lists = Lists()
    controller = Controller(OperatorSettings(), OperatorMetrics())
    resync = Resync(lists, controller, ["one", "two"], grace_s=0)  # type: ignore[arg-type]
    requests: list[Any] = lists.requests
    await resync.fill()
    paths = [path for path, _ in requests]
    assert "/api/v1/nodes" in paths
    assert "/api/v1/namespaces/one/pods" in paths
    assert "/api/v1/namespaces/two/pods" in paths
    assert "/api/v1/pods" not in paths
