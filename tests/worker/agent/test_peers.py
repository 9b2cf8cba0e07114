"""Where other agents are looked up, and how often."""

import pytest

from cleave.rpc.v1 import agent_pb2
from cleave_worker.agent import peers
from cleave_worker.agent.peers import PeerAddresses, PeerScan, find_peer


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources that were looked up; a name ending in `away` cannot be."""
    requests: list[str] = []

    async def find_agents(source: str) -> frozenset[str]:
        requests.append(source)
        if source.endswith("away"):
            raise OSError("away")
        return frozenset(("a:1", "b:1"))

    monkeypatch.setattr(peers, "list_agents", find_agents)
    return requests


async def test_ones_own_address_is_nobodys_peer(lookups: list[str]) -> None:
    assert await PeerAddresses("dns:workers:1", "a:1").get_addresses() == {"b:1"}


@pytest.mark.parametrize(("source", "times"), [("endpoints:n/workers:1", 1), ("file:x", 3)])
async def test_only_the_api_server_is_spared(lookups: list[str], source: str, times: int) -> None:
    addresses = PeerAddresses(source, "a:1")
    for _ in range(3):
        assert await addresses.get_addresses() == {"b:1"}
    assert lookups == [source] * times


async def test_a_list_grows_old(lookups: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_LIST_SECONDS", 0.0)
    addresses = PeerAddresses("endpoints:n/workers:1", "a:1")
    await addresses.get_addresses()
    await addresses.get_addresses()
    assert len(lookups) == 2


async def test_an_unavailable_server_is_not_queried_more_often(lookups: list[str]) -> None:
    addresses = PeerAddresses("endpoints:n/away", "a:1")
    with pytest.raises(OSError, match="away"):
        await addresses.get_addresses()
    assert await addresses.get_addresses() == frozenset()
    assert len(lookups) == 1


@pytest.mark.parametrize("odd", [{"role": 9}, {"state": 9}, {"role": 9, "state": 9}])
async def test_an_agent_of_a_newer_version_is_no_peer(
    monkeypatch: pytest.MonkeyPatch, odd: dict[str, int]
) -> None:
    usual = {"role": agent_pb2.ROLE_DECODE, "state": agent_pb2.STATE_READY}

    async def ask(address: str) -> agent_pb2.Registration:
        return agent_pb2.Registration(instance=address, **(usual | odd))

    monkeypatch.setattr(peers, "fetch_registration", ask)
    own = agent_pb2.Registration(instance="own", role=agent_pb2.ROLE_PREFILL)
    assert await find_peer(["a:1", "b:1"], own) == PeerScan()


async def test_a_peer_has_loaded_the_same_weights_or_may_still_do_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {
        "other:1": ("r1@b2", agent_pb2.STATE_READY),
        "none:1": ("r1", agent_pb2.STATE_READY),
        "spec:1": ("r2@a1", agent_pb2.STATE_STARTING),
    }

    async def ask(address: str) -> agent_pb2.Registration:
        revision, state = known[address]
        role = agent_pb2.ROLE_DECODE
        return agent_pb2.Registration(instance=address, role=role, revision=revision, state=state)

    monkeypatch.setattr(peers, "fetch_registration", ask)
    own = agent_pb2.Registration(
        instance="own", role=agent_pb2.ROLE_PREFILL, revision="r1@a1", state=agent_pb2.STATE_READY
    )
    assert await find_peer([*known], own) == PeerScan()
    known["starts:1"] = ("r1", agent_pb2.STATE_STARTING)
    assert await find_peer([*known], own) == PeerScan(has_starting=True)
    known["same:1"] = ("r1@a1", agent_pb2.STATE_READY)
    scan = await find_peer([*known], own)
    assert scan.peer is not None
    assert scan.peer.instance == "same:1"
