"""Where the agents are."""

import asyncio
from pathlib import Path

import pytest

from cleave.rpc.agent_discovery import (
    AgentDiscovery,
    AgentSourceUnreachable,
    DiscoveryError,
    find_agent,
    list_agents,
)
from cleave.rpc.credentials import AgentEndpoint


async def test_a_list_of_addresses_stands_for_itself() -> None:
    assert await list_agents("127.0.0.1:9000, 127.0.0.2:9000") == {
        AgentEndpoint("127.0.0.1:9000"),
        AgentEndpoint("127.0.0.2:9000"),
    }


async def test_a_file_is_read_anew_at_each_call(tmp_path: Path) -> None:
    file = tmp_path / "agents"
    assert await list_agents(f"file:{file}") == frozenset()
    file.write_text("127.0.0.1:9000\n127.0.0.2:9000\n")
    assert len(await list_agents(f"file:{file}")) == 2
    file.write_text("")
    assert await list_agents(f"file:{file}") == frozenset()


async def test_a_name_gives_all_of_its_addresses() -> None:
    assert AgentEndpoint("127.0.0.1:9000") in await list_agents("dns:localhost:9000")


async def test_an_unknown_name_means_none_yet() -> None:
    assert await list_agents("dns:no-such-host.invalid:9000") == frozenset()


@pytest.mark.parametrize(
    "source", ["localhost", "dns:name", "127.0.0.1:0", "127.0.0.1:70000", ":1"]
)
async def test_a_malformed_source_is_named(source: str) -> None:
    with pytest.raises(DiscoveryError, match="HOST:PORT"):
        await list_agents(source)


@pytest.mark.parametrize("source", ["endpoints:workers:9000", "endpoints:a/b/c:1", "endpoints:a/b"])
async def test_a_malformed_service_is_named(source: str) -> None:
    with pytest.raises(DiscoveryError, match=r"HOST:PORT|NAMESPACE/SERVICE:PORT"):
        await list_agents(source)
    with pytest.raises(DiscoveryError):
        await AgentDiscovery(source).list_addresses()


async def test_a_service_needs_a_way_to_the_cluster(monkeypatch) -> None:
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    for look in (list_agents, lambda source: AgentDiscovery(source).list_addresses()):
        with pytest.raises(DiscoveryError, match="set KUBECONFIG"):
            await look("endpoints:prod/workers:9000")


async def test_an_unavailable_server_differs_from_an_empty_list(server) -> None:
    assert await list_agents("endpoints:prod/workers:9000") == frozenset()
    await server.stop()
    with pytest.raises(AgentSourceUnreachable):
        await list_agents("endpoints:prod/workers:9000")


async def test_a_service_is_followed_from_the_first_question_on(server, make_slice, until) -> None:
    agents = AgentDiscovery("endpoints:prod/workers:9000")
    server.slices = {"one": make_slice("one", "10.0.0.1")}
    assert await agents.list_addresses() == frozenset()
    await until(lambda: server.is_watched, "it watches")
    assert await agents.list_addresses() == {"10.0.0.1:9000"}
    server.put(make_slice("one", "10.0.0.2"))
    for _ in range(1_000):
        if await agents.list_addresses() == {"10.0.0.2:9000"}:
            break
        await asyncio.sleep(0.01)
    assert await agents.list_addresses() == {"10.0.0.2:9000"}
    assert (server.lists, server.watches) == (1, 1)
    found = agents.find_agent("10.0.0.2:9000")
    assert (found.pod, found.pod_uid) == ("pod-10.0.0.2", "uid-10.0.0.2")
    assert agents.find_agent("10.0.0.1:9000") == AgentEndpoint("10.0.0.1:9000")
    await agents.close()
    await until(lambda: not server.is_watched, "it lets go")


async def test_other_sources_are_queried_each_time(tmp_path: Path) -> None:
    agents = AgentDiscovery(f"file:{tmp_path / 'agents'}")
    assert await agents.list_addresses() == frozenset()
    (tmp_path / "agents").write_text("127.0.0.1:9000")
    assert await agents.list_addresses() == {"127.0.0.1:9000"}
    await agents.close()


async def test_the_host_name_of_a_pod_leads_to_its_address_and_uid(server, make_slice) -> None:
    item = make_slice("one", "10.0.0.1", "10.0.0.2")
    item["endpoints"][1]["targetRef"] |= {"name": "chat-0", "uid": "u7"}
    server.slices = {"one": item}
    source = "endpoints:prod/workers:9000"
    for host in ("chat-0.workers.prod.svc", "chat-0"):
        expected = AgentEndpoint("10.0.0.2:8999", "chat-0", "u7")
        assert await find_agent(source, f"{host}:8999") == expected
    with pytest.raises(AgentSourceUnreachable, match="lists no pod chat-1"):
        await find_agent(source, "chat-1.workers.prod.svc:8999")
    assert await find_agent("", "10.0.0.9:8999") == AgentEndpoint("10.0.0.9:8999")
