"""Where other agents are looked up, and how often."""

import pytest

from cleave_worker.agent import peers
from cleave_worker.agent.peers import Addresses


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources that were looked up; a name ending in `away` cannot be."""
    asked: list[str] = []

    async def find_agents(source: str) -> frozenset[str]:
        asked.append(source)
        if source.endswith("away"):
            raise OSError("away")
        return frozenset(("a:1", "b:1"))

    monkeypatch.setattr(peers, "find_agents", find_agents)
    return asked


async def test_ones_own_address_is_nobodys_peer(lookups: list[str]) -> None:
    assert await Addresses("dns:workers:1", "a:1").find() == {"b:1"}


@pytest.mark.parametrize(("source", "times"), [("endpoints:n/workers:1", 1), ("file:x", 3)])
async def test_only_the_api_server_is_spared(lookups: list[str], source: str, times: int) -> None:
    addresses = Addresses(source, "a:1")
    for _ in range(3):
        assert await addresses.find() == {"b:1"}
    assert lookups == [source] * times


async def test_a_list_grows_old(lookups: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_LIST_SECONDS", 0.0)
    addresses = Addresses("endpoints:n/workers:1", "a:1")
    await addresses.find()
    await addresses.find()
    assert len(lookups) == 2


async def test_a_server_that_is_away_is_not_asked_more_often(lookups: list[str]) -> None:
    addresses = Addresses("endpoints:n/away", "a:1")
    with pytest.raises(OSError, match="away"):
        await addresses.find()
    assert await addresses.find() == frozenset()
    assert len(lookups) == 1
