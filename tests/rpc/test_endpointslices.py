"""Endpoints of a Service through an API server that comes, goes and misbehaves."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from cleave.rpc import endpointslices
from cleave.rpc.credentials import AgentEndpoint
from cleave.rpc.endpointslices import EndpointSliceWatcher, Service, list_endpoints, parse_slice
from cleave.rpc.kube_api import ApiServerError
from cleave.rpc.plan_thresholds import PlanThresholds

WORKERS = Service("prod", "chat-workers", 9000)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpointslices, "MIN_DELAY_S", 0.01)
    monkeypatch.setattr(endpointslices, "MAX_DELAY_S", 0.05)


@contextlib.asynccontextmanager
async def watching() -> AsyncIterator[EndpointSliceWatcher]:
    watcher = EndpointSliceWatcher(WORKERS)
    task = asyncio.create_task(watcher.run())
    try:
        yield watcher
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_a_list_names_every_endpoint_ready_or_not(server, make_slice) -> None:
    server.slices = {
        "one": make_slice("one", "10.0.0.1", "10.0.0.2"),
        "two": make_slice("two", "fd00::1", kind="IPv6"),
    }
    found = await list_endpoints(WORKERS)
    assert set(found) == {"10.0.0.1:9000", "10.0.0.2:9000", "[fd00::1]:9000"}
    assert server.paths == ["/apis/discovery.k8s.io/v1/namespaces/prod/endpointslices"]
    assert server.queries[0]["labelSelector"] == "kubernetes.io/service-name=chat-workers"
    assert "Authorization: Bearer secret\r\n" in server.headers[0]
    # The API server answers 406 where its public keys are not accepted as what they are.
    assert "Accept: application/json, application/jwk-set+json\r\n" in server.headers[0]


async def test_a_refusal_is_reported_in_the_servers_words(server) -> None:
    server.status = 403
    with pytest.raises(ApiServerError, match="403: not for you"):
        await list_endpoints(WORKERS)


@pytest.mark.parametrize(
    "item",
    [
        {"addressType": "FQDN", "endpoints": [{"addresses": ["a.example"]}]},
        {"addressType": "IPv4"},
        {"addressType": "IPv4", "endpoints": None},
    ],
)
def test_a_slice_may_be_empty(item: dict) -> None:
    assert parse_slice(item, 9000) == {}


async def test_changes_are_followed_without_another_list(server, make_slice, until) -> None:
    server.slices = {"one": make_slice("one", "10.0.0.1")}
    async with watching() as watcher:
        await until(lambda: server.is_watched, "it watches")
        assert set(watcher.endpoints) == {"10.0.0.1:9000"}
        server.put(make_slice("two", "10.0.0.2"), "ADDED")
        await until(lambda: len(watcher.endpoints) == 2, "a new slice")
        server.put(make_slice("one", "10.0.0.1", "10.0.0.3"))
        await until(lambda: len(watcher.endpoints) == 3, "a changed slice")
        server.send({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}})
        server.delete("one")
        await until(lambda: set(watcher.endpoints) == {"10.0.0.2:9000"}, "a slice that is gone")
        assert (server.lists, server.watches) == (1, 1)
    assert server.queries[1]["resourceVersion"] == "7"
    assert server.queries[1]["allowWatchBookmarks"] == "true"
    assert 0 < int(server.queries[1]["timeoutSeconds"]) <= endpointslices.WATCH_TIMEOUT_S


async def test_the_end_of_a_watch_brings_a_new_list(server, make_slice, until) -> None:
    async with watching() as watcher:
        await until(lambda: server.is_watched, "it watches")
        server.slices["one"] = make_slice("one", "10.0.0.1")
        server.end_watches()
        await until(lambda: set(watcher.endpoints) == {"10.0.0.1:9000"}, "what the watch missed")
        await until(lambda: server.is_watched, "it watches again")


@pytest.mark.parametrize(
    "event",
    [
        {"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}},
        {"type": "ERROR", "object": {"code": 500, "message": "etcd"}},
        {"type": "MODIFIED", "object": {}},
        "nonsense",
        7,
    ],
    ids=["gone", "fault", "nameless", "text", "number"],
)
async def test_a_watch_that_fails_is_begun_again(server, make_slice, until, event) -> None:
    async with watching() as watcher:
        await until(lambda: server.is_watched, "it watches")
        server.slices["one"] = make_slice("one", "10.0.0.1")
        server.send(event)
        await until(lambda: set(watcher.endpoints) == {"10.0.0.1:9000"}, "a new list")


async def test_what_was_known_stays_while_the_server_is_away(server, make_slice, until) -> None:
    server.slices = {"one": make_slice("one", "10.0.0.1")}
    async with watching() as watcher:
        await until(lambda: server.is_watched, "it watches")
        await server.stop()
        await asyncio.sleep(0.2)
        assert set(watcher.endpoints) == {"10.0.0.1:9000"}
        server.slices = {"one": make_slice("one", "10.0.0.2")}
        await server.start()
        await until(lambda: set(watcher.endpoints) == {"10.0.0.2:9000"}, "it has come back")


async def test_thresholds_of_the_service_follow_its_labels(server, make_slice, until) -> None:
    server.slices = {
        "one": make_slice("one", "10.0.0.1", version=5, short_prompt_tokens=256),
        "two": make_slice("two", "fd00::1", kind="IPv6", version=4),
    }
    async with watching() as watcher:
        await until(lambda: server.is_watched, "it watches")
        assert watcher.thresholds == PlanThresholds(256), "the one written last counts"
        server.put(make_slice("two", version=9, short_prompt_tokens=64, overlap_min_tokens=512))
        await until(lambda: watcher.thresholds == PlanThresholds(64, 512), "other labels")
        await server.stop()
        await asyncio.sleep(0.2)
        assert watcher.thresholds == PlanThresholds(64, 512), "as the addresses, while it is away"
        server.slices = {"one": make_slice("one", "10.0.0.1", version=10)}
        await server.start()
        await until(lambda: watcher.thresholds == PlanThresholds(), "a plan without any")


async def test_a_refused_watcher_backs_off(server, until) -> None:
    server.status = 403
    async with watching():
        await asyncio.sleep(0.5)
        # 0.05 s between any two once the delay has grown, halved at most by chance.
        assert 3 <= len(server.queries) <= 25


def test_pods_with_several_agents_have_an_address_for_each() -> None:
    item = {
        "addressType": "IPv4",
        "endpoints": [
            {"addresses": [f"10.0.0.{host}"], "targetRef": {"kind": "Pod", "name": "p", "uid": "u"}}
            for host in (1, 2)
        ],
        "ports": [
            {"name": "agent", "port": 9000},
            {"name": "agent-1", "port": 9002},
            {"name": "metrics", "port": 80},
        ],
    }
    found = parse_slice(item, 9000)
    assert set(found) == {f"10.0.0.{host}:{port}" for host in (1, 2) for port in (9000, 9002)}


def test_ports_without_a_name_or_number_are_skipped() -> None:
    item = {
        "addressType": "IPv4",
        "endpoints": [
            {"addresses": ["10.0.0.1"], "targetRef": {"kind": "Pod", "name": "p", "uid": "u"}}
        ],
        "ports": [
            {"name": None, "port": 9001},
            {"port": 9001},
            {"name": "agent-1", "port": None},
            {"name": "agent-2"},
            {"name": "agent-3", "port": 9006},
        ],
    }
    assert set(parse_slice(item, 9000)) == {"10.0.0.1:9000", "10.0.0.1:9006"}


def test_only_pods_are_agents_and_have_their_name_and_uid() -> None:
    item = {
        "addressType": "IPv4",
        "endpoints": [
            {"addresses": ["10.0.0.1"], "targetRef": {"kind": "Pod", "name": "p-0", "uid": "u0"}},
            {"addresses": ["10.0.0.2"], "targetRef": {"kind": "Node", "name": "n", "uid": "u1"}},
            {"addresses": ["10.0.0.3"]},
        ],
    }
    agent = AgentEndpoint("10.0.0.1:9000", "p-0", "u0")
    assert parse_slice(item, 9000) == {"10.0.0.1:9000": agent}
