"""Where other agents are looked up, and how often."""

import pytest

from cleave.rpc.credentials import AgentEndpoint, Credentials
from cleave.rpc.v1 import agent_pb2
from cleave_worker.agent import peers
from cleave_worker.agent.peers import PeerEndpoints, PeerScan, find_peer

OTHER = AgentEndpoint("b:1")


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources that were looked up; a name ending in `away` cannot be."""
    requests: list[str] = []

    async def find_agents(source: str) -> frozenset[AgentEndpoint]:
        requests.append(source)
        if source.endswith("away"):
            raise OSError("away")
        return frozenset((AgentEndpoint("a:1"), OTHER))

    monkeypatch.setattr(peers, "list_agents", find_agents)
    return requests


async def test_ones_own_address_is_nobodys_peer(lookups: list[str]) -> None:
    assert await PeerEndpoints("dns:workers:1", "a:1").get_endpoints() == {OTHER}


@pytest.mark.parametrize(("source", "times"), [("endpoints:n/workers:1", 1), ("file:x", 3)])
async def test_only_the_api_server_is_spared(lookups: list[str], source: str, times: int) -> None:
    endpoints = PeerEndpoints(source, "a:1")
    for _ in range(3):
        assert await endpoints.get_endpoints() == {OTHER}
    assert lookups == [source] * times


async def test_a_list_grows_old(lookups: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_LIST_SECONDS", 0.0)
    endpoints = PeerEndpoints("endpoints:n/workers:1", "a:1")
    await endpoints.get_endpoints()
    await endpoints.get_endpoints()
    assert len(lookups) == 2


async def test_an_unavailable_server_is_not_queried_more_often(lookups: list[str]) -> None:
    endpoints = PeerEndpoints("endpoints:n/away", "a:1")
    with pytest.raises(OSError, match="away"):
        await endpoints.get_endpoints()
    assert await endpoints.get_endpoints() == frozenset()
    assert len(lookups) == 1


@pytest.mark.parametrize("odd", [{"role": 9}, {"state": 9}, {"role": 9, "state": 9}])
async def test_an_agent_of_a_newer_version_is_no_peer(
    monkeypatch: pytest.MonkeyPatch, odd: dict[str, int]
) -> None:
    usual = {"role": agent_pb2.ROLE_DECODE, "state": agent_pb2.STATE_READY}

    async def ask(agent: AgentEndpoint, _: Credentials) -> agent_pb2.Registration:
        return agent_pb2.Registration(instance=agent.address, **(usual | odd))

    monkeypatch.setattr(peers, "fetch_registration", ask)
    own = agent_pb2.Registration(instance="own", role=agent_pb2.ROLE_PREFILL)
    assert await find_peer([AgentEndpoint("a:1"), OTHER], own, Credentials()) == PeerScan()


async def test_a_peer_has_loaded_the_same_weights_or_may_still_do_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {
        "other:1": ("r1@b2", agent_pb2.STATE_READY),
        "none:1": ("r1", agent_pb2.STATE_READY),
        "spec:1": ("r2@a1", agent_pb2.STATE_STARTING),
    }

    async def ask(agent: AgentEndpoint, _: Credentials) -> agent_pb2.Registration:
        revision, state = known[agent.address]
        role, name = agent_pb2.ROLE_DECODE, agent.address
        return agent_pb2.Registration(instance=name, role=role, revision=revision, state=state)

    async def find() -> PeerScan:
        return await find_peer([*map(AgentEndpoint, known)], own, Credentials())

    monkeypatch.setattr(peers, "fetch_registration", ask)
    own = agent_pb2.Registration(
        instance="own", role=agent_pb2.ROLE_PREFILL, revision="r1@a1", state=agent_pb2.STATE_READY
    )
    assert await find() == PeerScan()
    known["starts:1"] = ("r1", agent_pb2.STATE_STARTING)
    assert await find() == PeerScan(has_starting=True)
    known["same:1"] = ("r1@a1", agent_pb2.STATE_READY)
    scan = await find()
    assert scan.peer is not None
    assert scan.peer.instance == "same:1"
