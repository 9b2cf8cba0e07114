"""When gateways are polled, and how long an answer stays valid."""

import pytest

from cleave.controller.cluster.gateway_client import GatewayClient
from cleave.rpc.fleet_status import FleetInstance, KvPath

READY = frozenset({"a"})
GATEWAYS = ("10.0.0.1",)


class Gateways:
    def __init__(self) -> None:
        self.requests: list[list[str]] = []
        self.now_s = 0.0
        self.answer = {"a": FleetInstance("a", selectable=True, kv_path=KvPath(verified=True))}

    async def ask(self, urls):
        self.requests.append(list(urls))
        return self.answer


@pytest.fixture
def gateways() -> Gateways:
    return Gateways()


@pytest.fixture
def client(gateways: Gateways) -> GatewayClient[str]:
    return GatewayClient(lambda: gateways.now_s, gateways.ask)


async def test_an_answer_counts_until_other_instances_are_ready(
    client: GatewayClient[str], gateways: Gateways
) -> None:
    assert "a" in await client.get_or_refresh("chat", GATEWAYS, READY)
    await client.get_or_refresh("chat", GATEWAYS, READY)
    assert len(gateways.requests) == 1
    await client.get_or_refresh("chat", GATEWAYS, READY | {"b"})
    assert len(gateways.requests) == 2


async def test_an_answer_counts_for_a_while_and_a_partial_one_shorter(
    client: GatewayClient[str], gateways: Gateways
) -> None:
    await client.get_or_refresh("chat", GATEWAYS, READY)
    assert client.get_retry_delay_s("chat") is None
    gateways.now_s = 44
    await client.get_or_refresh("chat", GATEWAYS, READY)
    assert len(gateways.requests) == 1
    gateways.now_s, gateways.answer = 46, {"a": FleetInstance("a", selectable=True)}
    await client.get_or_refresh("chat", GATEWAYS, READY)
    assert client.get_retry_delay_s("chat") == 1
    gateways.now_s = 48
    await client.get_or_refresh("chat", GATEWAYS, READY)
    assert len(gateways.requests) == 3


async def test_gateways_are_polled_soon_until_they_route_to_all_instances(
    client: GatewayClient[str], gateways: Gateways
) -> None:
    gateways.answer = {"a": FleetInstance("a", kv_path=KvPath(verified=True))}
    for pause_s in (1, 2, 4):
        await client.get_or_refresh("chat", GATEWAYS, READY)
        assert client.get_retry_delay_s("chat") == pause_s
        gateways.now_s += pause_s
    gateways.answer = {"a": FleetInstance("a", selectable=True, kv_path=KvPath(verified=True))}
    await client.get_or_refresh("chat", GATEWAYS, READY)
    assert client.get_retry_delay_s("chat") is None


async def test_without_addresses_nothing_is_queried(
    client: GatewayClient[str], gateways: Gateways
) -> None:
    assert await client.get_or_refresh("chat", (), READY) is None
    assert await client.get_or_refresh("chat", GATEWAYS, frozenset()) is None
    assert not gateways.requests


async def test_gateways_that_do_not_answer_have_said_nothing_new(
    client: GatewayClient[str], gateways: Gateways
) -> None:
    before = await client.get_or_refresh("chat", GATEWAYS, READY)
    gateways.now_s, gateways.answer = 99, None
    assert await client.get_or_refresh("chat", GATEWAYS, READY) == before


async def test_a_decision_may_want_to_know_what_is_true_now(
    client: GatewayClient[str], gateways: Gateways
) -> None:
    await client.get_or_refresh("chat", GATEWAYS, READY)
    gateways.now_s = 10
    await client.get_fresh("chat", ("fd00::1",))
    await client.get_fresh("chat", GATEWAYS)
    assert gateways.requests[1:] == [["http://[fd00::1]:8081"]]
