"""A sender whose requests have ended engines gets one engine at a time, however they differ."""

import asyncio
import json
import random
from types import SimpleNamespace

import pytest

from cleave.gateway.upstream import suspect_senders
from cleave.gateway.upstream.suspect_senders import (
    CONFINED_S,
    MAX_UNANSWERED,
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
    stage.away, stage.delay_s = set(), 0.0

    async def die(engine, request, writer) -> None:
        if request.body["prompt"] != "poison":
            await engine.answer(request, writer)
            return
        await asyncio.shield(asyncio.create_task(end_later(engine, writer)))

    async def end_later(engine, writer) -> None:
        await asyncio.sleep(stage.delay_s)
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


@pytest.mark.parametrize("leaves_after_s", [0.05, 0.25])
async def test_a_client_that_leaves_is_a_suspect_as_well(fleet, leaves_after_s: float) -> None:
    """Its requests are not tried again, so none of them is seen to end two engines."""
    fleet.delay_s = 0.15
    for seed in range(8):
        client = await fleet.connect()
        client.send(POISON | {"seed": seed})
        await asyncio.sleep(leaves_after_s)
        client.close()
        await asyncio.sleep(0.3)
    assert len(fleet.away) <= 4
    assert (await fleet.ask(ASK, **OTHER)).status == 200


async def test_few_of_the_requests_in_flight_are_tried_again(fleet) -> None:
    fleet.delay_s = 0.15
    await asyncio.gather(*(fleet.ask(POISON | {"seed": seed}) for seed in range(3)))
    assert len(fleet.away) <= 4
    assert len(fleet.context.suspect_senders._expiries) == 1


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


@pytest.mark.parametrize(
    ("entries", "is_same"),
    [
        ([b"198.51.100.4", b"forged, 198.51.100.4:1234", b"::ffff:198.51.100.4"], True),
        ([b"2001:db8::1", b"2001:db8::2", b"[2001:db8::3]", b"[2001:db8::4]:80"], True),
        ([b"2001:db8::1", b"2001:db8:0:1::1"], False),
        ([b"", b"unknown", b"_hidden", b"a\0b", b"::", b"\xff\xfe"], False),
    ],
)
def test_a_port_or_an_address_of_the_same_network_is_no_other_sender(entries, is_same) -> None:
    senders = {get_sender("", "192.0.2.1", entry) for entry in entries}
    assert len(senders) == (1 if is_same else len(entries))


async def test_a_client_behind_a_proxy_that_appends_a_line_keeps_its_address(single) -> None:
    """It would otherwise choose it in a line of its own, and have others confined."""
    client, body = await single.connect(), json.dumps(ASK).encode()
    for forged in ("192.0.2.1", "192.0.2.2"):
        client.writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nX-Forwarded-For: %b\r\n"
            b"x-forwarded-for: 198.51.100.4\r\ncontent-length: %d\r\n\r\n%b"
            % (forged.encode(), len(body), body)
        )
        assert (await client.read()).status == 200
    assert list(single.context.suspect_senders._starts) == ["127.0.0.1 198.51.100.4"]


def build_registry(*names: str, size: int = 1) -> SimpleNamespace:
    def build(name: str) -> SimpleNamespace:
        registration = SimpleNamespace(boot_id=f"{name}-1", state=agent_pb2.STATE_READY)
        whole = name.partition(".")[0] if size > 1 else name
        return SimpleNamespace(whole=whole, registration=registration, selectable=True)

    models = {"m": SimpleNamespace(base=""), "sql": SimpleNamespace(base="m")}
    return SimpleNamespace(instances={name: build(name) for name in names}, models=models)


def build_pick(registry: SimpleNamespace, decode: str, prefill: str | None = None):
    def build(name: str | None):
        if name is None:
            return None
        return SimpleNamespace(instance=name, boot_id=registry.instances[name].registration.boot_id)

    return SimpleNamespace(prefill=build(prefill), decode=build(decode))


def end(registry: SimpleNamespace, name: str) -> None:
    """The process of this engine ends, and another one starts."""
    registration = registry.instances[name].registration
    registration.boot_id += "1"


def start(senders, registry, sender: str, name: str, now: float, model: str = "m"):
    pick = build_pick(registry, name)
    senders.record_start(sender, model, pick, registry, now)
    PICKS.append(pick)
    return pick


PICKS = []
"""What is freed may have its id used again."""


def test_adapters_and_ranks_belong_to_one_engine() -> None:
    registry = build_registry("a.rank-0", "a.rank-1", "b.rank-0", size=2)
    senders = SuspectSenders()
    senders.add("s", 0.0)
    assert senders.list_closed("s", "m", registry) == []
    start(senders, registry, "s", "a.rank-1", 0.0, "sql")
    assert senders.list_closed("s", "m", registry) == ["b.rank-0"]
    assert senders.list_closed("t", "m", registry) == []


def test_an_engine_that_ends_for_another_reason_is_replaced() -> None:
    registry, senders = build_registry("a", "b"), SuspectSenders()
    senders.add("s", 0.0)
    senders.record_answer("s", start(senders, registry, "s", "a", 0.0))
    assert senders.list_closed("s", "m", registry) == ["b"]
    registry.instances["a"].selectable = False
    assert senders.check("s", registry, 0.5)
    assert senders.list_closed("s", "m", registry) == []
    start(senders, registry, "s", "a", 1.0)
    end(registry, "a")
    assert senders.check("s", registry, 1.5)
    assert senders.list_closed("s", "m", registry) == ["b"], "it ended because of the sender"


def test_two_engines_that_ended_before_they_answered_make_a_suspect() -> None:
    registry, senders = build_registry("a", "b", "c"), SuspectSenders()
    for number, name in enumerate("ab"):
        start(senders, registry, "s", name, float(number))
        start(senders, registry, "s", name, float(number))
        assert not senders.check("s", registry, number + 0.1)
        end(registry, name)
        assert senders.check("s", registry, number + 0.5) is (number == 1)


def test_ranks_that_end_together_are_one_engine() -> None:
    registry = build_registry("a.rank-0", "a.rank-1", size=2)
    senders = SuspectSenders()
    for name in registry.instances:
        start(senders, registry, "s", name, 0.0)
        end(registry, name)
    assert not senders.check("s", registry, 1.0)


def test_answers_and_time_are_proofs_of_innocence() -> None:
    registry, senders = build_registry("a", "b", "c"), SuspectSenders()
    for name in "abc":
        senders.record_answer("answered", start(senders, registry, "answered", name, 0.0))
        start(senders, registry, "early", name, 0.0)
    for name in "abc":
        end(registry, name)
    assert not senders.check("answered", registry, 0.1)
    assert not senders.check("early", registry, 20.0)


def test_a_sender_with_many_requests_is_no_suspect_because_engines_end() -> None:
    registry, senders = build_registry(*"abcdef"), SuspectSenders()
    for number in range(60):
        name = "abcdef"[number % 6]
        pick = start(senders, registry, "s", name, float(number))
        if number % 10 == 9:
            end(registry, name)
        else:
            senders.record_answer("s", pick)
        assert not senders.is_suspect("s", registry, number + 0.2)


def test_senders_are_forgotten_after_some_minutes_without_a_new_case() -> None:
    senders, registry = SuspectSenders(), build_registry("a", "b")
    senders.add("s", 0.0)
    start(senders, registry, "s", "a", 0.0)
    senders.add("s", 100.0)
    assert senders.list_closed("s", "m", registry) == ["b"]
    senders.expire(CONFINED_S + 99)
    assert "s" in senders
    senders.expire(CONFINED_S + 100)
    assert "s" not in senders
    assert not senders._instances
    assert not senders._starts


def test_what_is_remembered_is_limited(monkeypatch) -> None:
    monkeypatch.setattr(suspect_senders, "MAX_REMEMBERED", 10)
    senders, registry = SuspectSenders(), build_registry("a", "b")
    for number in range(100):
        senders.add(f"s{number}", float(number))
        start(senders, registry, f"s{number}", "a", float(number))
    assert len(senders._expiries) == len(senders._instances) == len(senders._starts) == 10
    for number in range(10 * MAX_UNANSWERED):
        start(senders, registry, "busy", "a", float(number))
    assert len(senders._starts["busy"].unanswered) == MAX_UNANSWERED
