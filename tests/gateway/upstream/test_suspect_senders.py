"""A sender whose requests have ended engines gets one engine at a time, however they differ."""

import random
from types import SimpleNamespace

import pytest

from cleave.gateway.upstream import suspect_senders
from cleave.gateway.upstream.suspect_senders import (
    CONFINED_S,
    MAX_REMEMBERED,
    SuspectSenders,
    get_sender,
)
from cleave.rpc.v1 import agent_pb2

ASK = {"model": "m", "prompt": "hello", "max_tokens": 3}
POISON = ASK | {"prompt": "poison"}
OTHER = {"X-Forwarded-For": "192.0.2.7"}


async def start_fleet(make_stage, roles: dict[str, str]):
    """Engines that a poisonous request ends: their agents say so."""
    stage = await make_stage(roles, wake_s=0.0)
    stage.away = set()

    async def die(engine, request, writer) -> None:
        if request.body["prompt"] != "poison":
            await engine.answer(request, writer)
            return
        stage.away.add(engine.name)
        stage.state(engine, state=agent_pb2.STATE_STARTING, reason="its process ended")
        writer.transport.abort()

    for engine in stage.engines.values():
        engine.script = die
    return stage


@pytest.fixture
async def fleet(make_stage):
    return await start_fleet(make_stage, {f"x{number}": "mixed" for number in range(6)})


def bring_back(stage) -> None:
    for name in stage.away:
        stage.state(stage.engines[name], boot_id=f"{name} again {random.random()}")
    stage.away.clear()


async def test_changed_requests_of_a_sender_end_one_more_engine(fleet) -> None:
    assert (await fleet.ask(POISON)).error["code"] == "suspect_request"
    assert len(fleet.away) == 2
    codes = [(await fleet.ask(POISON | {"seed": seed})).error["code"] for seed in range(8)]
    assert codes == ["suspect_request"] + 7 * ["suspect_sender"]
    assert len(fleet.away) == 3
    assert (await fleet.ask(ASK, **OTHER)).status == 200, "others are served"


async def test_such_a_sender_keeps_its_engine_when_that_is_back(fleet) -> None:
    await fleet.ask(POISON)
    bring_back(fleet)
    ended = set()
    for seed in range(8):
        assert (await fleet.ask(POISON | {"seed": seed})).error["code"] == "suspect_request"
        assert len(fleet.away) == 1
        ended |= fleet.away
        bring_back(fleet)
    assert len(ended) == 1


async def test_its_harmless_requests_are_served_by_its_engine(fleet) -> None:
    await fleet.ask(POISON)
    bring_back(fleet)
    served = {
        (await fleet.ask(ASK | {"seed": seed})).headers["x-cleave-decode"] for seed in range(6)
    }
    assert len(served) == 1


async def test_a_split_fleet_runs_its_requests_as_a_whole(make_stage) -> None:
    roles = {f"p{number}": "prefill" for number in range(3)}
    fleet = await start_fleet(make_stage, roles | {f"d{number}": "decode" for number in range(3)})
    await fleet.ask(POISON)
    for seed in range(5):
        await fleet.ask(POISON | {"seed": seed})
    assert len(fleet.away) == 3
    assert (await fleet.ask(ASK, **OTHER)).status == 200


async def test_an_engine_that_leaves_the_fleet_is_replaced(fleet) -> None:
    await fleet.ask(POISON)
    assert (await fleet.ask(POISON | {"seed": 1})).error["code"] == "suspect_request"
    (own,) = fleet.context.suspect_senders._instances.values()
    fleet.context.router.registry.remove_agent(own)
    assert (await fleet.ask(ASK)).status == 200


async def test_any_mix_of_a_sender_costs_one_engine_at_a_time(fleet) -> None:
    await fleet.ask(POISON)
    bring_back(fleet)
    picks = random.Random(7)
    for seed in range(60):
        body = picks.choice([ASK, POISON]) | {"seed": seed, "stream": picks.random() < 0.5}
        await fleet.ask(body)
        assert len(fleet.away) <= 1
        if picks.random() < 0.3:
            bring_back(fleet)


def test_a_tenant_or_an_address_is_a_sender() -> None:
    assert get_sender("acme", "192.0.2.1", b"198.51.100.4") == "acme"
    assert get_sender("", "192.0.2.1", None) == "192.0.2.1"
    assert get_sender("", "192.0.2.1", b"10.0.0.1, 198.51.100.4") == "192.0.2.1 198.51.100.4"
    assert len(get_sender("", "", b"\xff" * 10_000)) < 100


def build_registry(*names: str, size: int = 1) -> SimpleNamespace:
    instances = {
        name: SimpleNamespace(whole=name.partition(".")[0] if size > 1 else name) for name in names
    }
    models = {"m": SimpleNamespace(base=""), "sql": SimpleNamespace(base="m")}
    return SimpleNamespace(instances=instances, models=models)


def test_adapters_and_ranks_belong_to_one_engine() -> None:
    registry = build_registry("a.rank-0", "a.rank-1", "b.rank-0", size=2)
    senders = SuspectSenders()
    senders.add("s", 0.0)
    assert senders.list_closed("s", "m", registry) == []
    senders.record_pick("s", "sql", "a.rank-1", registry)
    assert senders.list_closed("s", "m", registry) == ["b.rank-0"]
    assert senders.list_closed("t", "m", registry) == []
    senders.record_pick("t", "m", "b.rank-0", registry)
    assert senders.list_closed("t", "m", registry) == [], "only suspects are confined"


def test_senders_are_forgotten_after_some_minutes_without_a_new_case() -> None:
    senders, registry = SuspectSenders(), build_registry("a", "b")
    senders.add("s", 0.0)
    senders.record_pick("s", "m", "a", registry)
    senders.add("s", 100.0)
    assert senders.list_closed("s", "m", registry) == ["b"]
    senders.expire(CONFINED_S + 99)
    assert "s" in senders
    senders.expire(CONFINED_S + 100)
    assert not senders
    assert not senders._instances


def test_a_limited_number_of_senders_is_remembered(monkeypatch) -> None:
    monkeypatch.setattr(suspect_senders, "MAX_REMEMBERED", 10)
    senders, registry = SuspectSenders(), build_registry("a", "b")
    for number in range(MAX_REMEMBERED):
        senders.add(f"s{number}", float(number))
        senders.record_pick(f"s{number}", "m", "a", registry)
    assert len(senders._expiries) == len(senders._instances) == 10
