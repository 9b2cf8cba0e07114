"""Where the agents are."""

from pathlib import Path

import pytest

from cleave.rpc.discovery import DiscoveryError, find_agents


async def test_a_list_of_addresses_stands_for_itself() -> None:
    assert await find_agents("127.0.0.1:9000, 127.0.0.2:9000") == {
        "127.0.0.1:9000",
        "127.0.0.2:9000",
    }


async def test_a_file_is_read_anew_at_each_call(tmp_path: Path) -> None:
    file = tmp_path / "agents"
    assert await find_agents(f"file:{file}") == frozenset()
    file.write_text("127.0.0.1:9000\n127.0.0.2:9000\n")
    assert len(await find_agents(f"file:{file}")) == 2
    file.write_text("")
    assert await find_agents(f"file:{file}") == frozenset()


async def test_a_name_gives_all_of_its_addresses() -> None:
    assert "127.0.0.1:9000" in await find_agents("dns:localhost:9000")


async def test_an_unknown_name_means_none_yet() -> None:
    assert await find_agents("dns:no-such-host.invalid:9000") == frozenset()


@pytest.mark.parametrize(
    "source", ["localhost", "dns:name", "127.0.0.1:0", "127.0.0.1:70000", ":1"]
)
async def test_a_malformed_source_is_named(source: str) -> None:
    with pytest.raises(DiscoveryError, match="HOST:PORT"):
        await find_agents(source)
