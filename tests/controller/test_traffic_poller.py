"""Who is looked at again when gateways have counted something, and who waits at them."""

import pytest

from cleave.api.deployment import LLMDeployment
from cleave.controller.cluster.cache import DEPLOYMENTS, ObjectCache, ResourceKey
from cleave.controller.cluster.traffic_scraper import TrafficScraper
from cleave.controller.traffic_poller import Activator, TrafficPoller
from cleave.manifests.labels import Manifest
from cleave.rpc import http_client
from cleave.traffic.window import TrafficWindow

from tests.support.deployment_views import NOW_S, deployment, status, traffic

CHAT = ResourceKey(DEPLOYMENTS, "default", "chat")
PAGES = {
    "http://10.0.0.1:8081/health": b'{"status": "ok", "requests_in_flight": 2}',
    "http://10.0.0.2:8081/health": b'{"requests_in_flight": 1, "models": {}}',
    "http://10.0.0.3:8081/health": b"<html>",
}
CHANGED = traffic(4, 600, NOW_S - 90) + traffic(12, 90)


class Counted(TrafficScraper[ResourceKey]):
    """Gateways that have just reported these windows."""

    def __init__(self, windows: tuple[TrafficWindow, ...], is_minute: bool) -> None:
        super().__init__(lambda: NOW_S)
        self.found, self.is_minute, self.looks = windows, is_minute, 0

    async def scrape(self, key: ResourceKey, gateways: object) -> bool:
        self.looks += 1
        return True

    def get_windows(self, key: ResourceKey) -> tuple[TrafficWindow, ...]:
        return self.found

    def is_minute_complete(self, key: ResourceKey) -> bool:
        return self.is_minute


async def look(
    windows: tuple[TrafficWindow, ...],
    desired: LLMDeployment | None = None,
    is_minute: bool = False,
) -> tuple[list[ResourceKey], int]:
    """(Which keys are enqueued, how often gateways were polled.)"""
    desired = desired or deployment()
    cache, again = ObjectCache(), list[ResourceKey]()
    cache.upsert({**written(desired), "status": status(desired)})
    cache.upsert(gateway())
    poller = TrafficPoller(cache, again.append, lambda: NOW_S)
    counted = Counted(windows, is_minute)
    poller.scraper = counted
    await poller.poll_traffic(CHAT)
    return again, counted.looks


def written(desired: LLMDeployment) -> Manifest:
    manifest: Manifest = desired.model_dump(mode="json", by_alias=True, exclude_none=True)
    manifest["metadata"]["resourceVersion"] = "1"
    return manifest


def gateway() -> Manifest:
    labels = {
        "cleave.dev/deployment": "chat",
        "cleave.dev/component": "gateway",
        "pod-template-hash": "x",
    }
    owner = {"kind": "ReplicaSet", "name": "chat-gateway-x", "uid": "r", "controller": True}
    meta = {"name": "g", "namespace": "default", "uid": "g", "labels": labels}
    meta["ownerReferences"] = [owner]
    return {
        "kind": "Pod",
        "metadata": {**meta, "resourceVersion": "1"},
        "status": {"podIP": "10.0.0.9"},
    }


async def test_a_change_is_recorded_with_the_window_that_shows_it() -> None:
    assert await look(CHANGED) == ([CHAT], 1)


async def test_steady_traffic_is_recorded_once_a_minute() -> None:
    assert await look(traffic(4)) == ([], 1)
    assert await look(traffic(4), is_minute=True) == ([CHAT], 1)


async def test_gateways_are_not_polled_without_a_consumer() -> None:
    assert await look(CHANGED, deployment({"mode": "Off"})) == ([], 0)


async def test_nothing_is_known_of_gateways_that_are_polled_no_longer() -> None:
    cache = ObjectCache()
    cache.upsert({**written(deployment({"mode": "Off"})), "status": status(deployment())})
    cache.upsert(gateway())
    poller = TrafficPoller(cache, lambda _: None, lambda: NOW_S)
    poller.scraper.record_request(CHAT)
    await poller.poll_traffic(CHAT)
    assert CHAT not in poller.scraper._state


def test_only_deployments_that_may_be_scaled_to_zero_are_polled_every_second() -> None:
    cache = ObjectCache()
    for name, scaling in (("steady", {}), ("chat", {"idleS": 600})):
        manifest = written(deployment(scaling=scaling))
        manifest["metadata"] |= {"name": name, "uid": name}
        cache.upsert(manifest)
    poller = TrafficPoller(cache, lambda _: None, lambda: NOW_S)
    assert poller.list_wake_up_keys() == [CHAT]


async def fetch(url: str) -> bytes:
    try:
        return PAGES[url]
    except KeyError as error:
        raise http_client.HttpError("refused") from error


@pytest.fixture
def activator() -> Activator:
    return Activator(fetch)


async def test_those_of_all_gateways_count(activator: Activator) -> None:
    assert activator.get_waiting(CHAT) == 0
    assert await activator.poll(CHAT, ["10.0.0.1", "10.0.0.2"]) == 3
    assert activator.get_waiting(CHAT) == 3
    activator.forget(CHAT)
    assert activator.get_waiting(CHAT) == 0


async def test_an_unusable_answer_counts_as_no_waiting_requests(activator: Activator) -> None:
    assert await activator.poll(CHAT, ["10.0.0.3", "10.0.0.4"]) == 0
