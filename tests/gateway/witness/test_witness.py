"""The witness against emulated engines with planted faults: it finds each, and takes out only the
pair that has it."""

import asyncio
import contextlib
import itertools
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import NoReturn

import aiohttp
import pytest

from cleave.gateway.witness import canary as canary_module
from cleave.gateway.witness import pair_list
from cleave.gateway.witness import witness as witness_module
from cleave.gateway.witness.canary import FaultyCanaryError
from cleave.gateway.witness.witness import Witness
from cleave.router.router import Router
from cleave.rpc.v1 import agent_pb2
from cleave_worker.emulator import tokenizer
from cleave_worker.emulator.faults import PairFault

PREFILLS, DECODES = ("p0", "p1", "p2", "p3"), ("d0", "d1", "d2", "d3")
SIXTEEN = dict.fromkeys(PREFILLS, "prefill") | dict.fromkeys(DECODES, "decode")
FOUR = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
PATIENCE_S = 60
"""Also what a fault may take to be found."""


@contextlib.asynccontextmanager
async def witnessed(stage, share: float = 1.0, period_s: float = 1.0) -> AsyncIterator[list]:
    """A witness, and what it sends to agents."""
    sent: list[tuple[str, agent_pb2.PairProofs]] = []

    async def send(agent: str, proofs: agent_pb2.PairProofs) -> None:
        sent.append((agent, proofs))

    witness = Witness(stage.context, share, period_s=period_s, send=send, seed=7)
    task = asyncio.create_task(witness.run())
    try:
        yield sent
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def trusts(stage) -> dict[str, int]:
    """Of each pair with a result."""
    instances = stage.context.router.registry.instances.values()
    return {
        f"{result.prefill}-{decode.name}": result.trust
        for decode in instances
        for result in decode.pairs.values()
    }


def closed(stage) -> set[str]:
    (table,) = stage.context.router.registry.list_tables()
    names, pairs = [each.name for each in table.instances], table.closed_pairs
    slots = range(len(names))
    return {f"{names[p]}-{names[d]}" for p in slots for d in slots if pairs.is_closed(p, d)}


def failed(stage, *, slow: bool = False) -> set[str]:
    """Pairs that failed, for being slow or for all else: on a busy machine good ones seem slow."""
    return {
        f"{result.prefill}-{decode.name}"
        for decode in stage.context.router.registry.instances.values()
        for result in decode.pairs.values()
        if result.trust == agent_pb2.TRUST_FAILED and ("pulled at" in result.reason) is slow
    }


def are_proven(stage, count: int) -> bool:
    return list(trusts(stage).values()) == [agent_pb2.TRUST_PROVEN] * count


async def ask_all(stage, emulate, count: int = 40) -> set[str]:
    """Requests whose answers must be those of an engine that no fault has reached; returns the
    pairs that served them."""
    alone = await emulate("boot-alone")
    pairs = set()
    async with aiohttp.ClientSession() as session:
        for number in range(count):
            prompt = f"{number} and its question " * (5 + number % 7)
            body = {"model": "m", "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
            response = await stage.ask(body)
            assert response.status == 200
            async with session.post(f"{alone.url}/v1/completions", json=body) as right:
                expected = (await right.json())["choices"][0]["text"]
            assert response.json()["choices"][0]["text"] == expected
            prefill = response.headers.get("x-cleave-prefill", "")
            pairs.add(f"{prefill}-{response.headers['x-cleave-decode']}")
    return pairs


async def test_pairs_of_engines_that_open_later_are_tested(make_stage) -> None:
    """Tables of scores stay the same then, but for the uses of their instances."""
    stage = await make_stage({"p0": "prefill", "d0": "decode"})
    registry = stage.context.router.registry
    (table,) = registry.list_tables()
    for engine in stage.engines.values():
        registry.on_disconnect(engine.name)
    witness = Witness(stage.context, 1.0, period_s=1.0, send=ignore, seed=7)
    await witness.check(stage.context.clock())
    assert not list(witness._pairs.boots)
    for engine in stage.engines.values():
        stage.state(engine)
    assert registry.list_tables() == [table]
    await witness.check(stage.context.clock())
    assert len(list(witness._pairs.boots)) == 2


async def ignore(agent: str, proofs: agent_pb2.PairProofs) -> None:
    """Send nothing."""


async def test_every_pair_is_proven_and_the_agents_of_decode_instances_keep_it(
    make_fleet,
) -> None:
    stage, _ = await make_fleet(FOUR, recomputes=True)
    async with witnessed(stage) as sent:
        await stage.until(lambda: are_proven(stage, 4), "all four pairs are proven")
    assert {agent for agent, _ in sent} == {"d0", "d1"}
    counted = stage.context.metrics
    assert counted.canaries.keys() == {"good"}
    assert counted.canary_seconds.keys() == {"prefill", "decode"}
    await stage.until_idle()


@pytest.mark.parametrize(
    ("fleet", "fault", "kind"),
    [
        (SIXTEEN, PairFault.EMPTY, "bytes"),
        (FOUR, PairFault.LOST, "bytes"),
        (SIXTEEN, PairFault.LAYOUT, "tokens"),
        (FOUR, PairFault.STALE, "tokens"),
        (FOUR, PairFault.SWAPPED, "tokens"),
    ],
)
async def test_one_bad_pair_is_taken_out_and_comes_back(
    make_fleet, emulate, fleet: dict[str, str], fault: PairFault, kind: str
) -> None:
    stage, engines = await make_fleet(fleet, recomputes=True)
    num_pairs = (len(fleet) // 2) ** 2
    engines["d1"].engine.faults.pairs = {"boot-p1": fault}
    async with witnessed(stage):
        await stage.until(lambda: failed(stage), "the fault is found")
        await stage.until(lambda: len(trusts(stage)) == num_pairs, "all pairs are tested")
        assert failed(stage) == {"p1-d1"} <= closed(stage)
        assert stage.context.metrics.canaries[kind] >= 2
        served = await ask_all(stage, emulate)
        assert "p1-d1" not in served
        engines["d1"].engine.faults.clear()
        await stage.until(lambda: "p1-d1" not in closed(stage), "the pair is back")


async def test_a_handoff_that_hangs_takes_its_pair_out_and_frees_the_prefill_engine(
    make_fleet, monkeypatch
) -> None:
    monkeypatch.setattr(canary_module, "_HANG_S", 1.0)
    stage, engines = await make_fleet(FOUR, recomputes=True)
    engines["d0"].engine.faults.pairs = {"boot-p1": PairFault.HUNG}
    async with witnessed(stage):
        await stage.until(lambda: failed(stage) == {"p1-d0"}, "the fault is found")
        await stage.until(lambda: len(trusts(stage)) == 4, "all pairs are tested")
        assert failed(stage) == {"p1-d0"}
        reason = stage.context.router.registry.instances["d0"].pairs["boot-p1"].reason
        assert reason.startswith("p1 -> d0: the decode engine has not answered within 1")
        assert stage.context.metrics.canaries["hung"] >= 2
        engines["d0"].engine.faults.clear()
        await stage.until(lambda: "p1-d0" not in closed(stage), "the pair is back")
    scheduler = engines["p1"].engine.scheduler
    # The leases last longer than this test waits.
    await stage.until(lambda: not scheduler.num_leased, "the prefill engine has freed the blocks")


async def test_an_engine_that_hangs_proves_nothing_against_its_pairs(
    make_fleet, monkeypatch
) -> None:
    monkeypatch.setattr(canary_module, "_HANG_S", 0.5)
    monkeypatch.setattr(canary_module, "_ALIVE_S", 0.5)
    stage, engines = await make_fleet({"p0": "prefill", "d0": "decode"}, recomputes=True)
    engines["d0"].engine.faults.apply(b'{"hang": true}')
    async with witnessed(stage):
        await stage.until(
            lambda: stage.context.metrics.canaries["blurred"] >= 2, "canaries show nothing"
        )
    assert not trusts(stage)
    engines["d0"].engine.faults.clear()


async def test_a_slow_card_loses_its_pairs_and_no_other(make_fleet) -> None:
    stage, engines = await make_fleet(SIXTEEN, time_scale=0.3, recomputes=True)
    for name in DECODES:
        engines[name].engine.faults.pairs = {"boot-p3": PairFault.SLOW}
    async with witnessed(stage):
        bad = {f"p3-{name}" for name in DECODES}
        await stage.until(lambda: failed(stage, slow=True) == bad, "the slow pairs are found")
        assert not failed(stage)
    result = stage.context.router.registry.instances["d0"].pairs["boot-p3"]
    assert result.reason.startswith("p3 -> d0: pulled at ")


async def test_an_engine_that_hands_over_another_request_loses_its_pairs(make_fleet) -> None:
    stage, engines = await make_fleet(FOUR, recomputes=True)
    engines["p1"].engine.faults.apply(b'{"swap_handoff": 1000}')
    async with witnessed(stage):
        await stage.until(lambda: failed(stage) == {"p1-d0", "p1-d1"}, "both are found")
    assert stage.context.metrics.canaries["refused"] >= 4


async def test_when_all_pairs_fail_requests_are_served_whole(make_fleet, emulate) -> None:
    stage, engines = await make_fleet(FOUR, recomputes=True)
    for name in ("d0", "d1"):
        faults = {"boot-p0": PairFault.LAYOUT, "boot-p1": PairFault.SWAPPED}
        engines[name].engine.faults.pairs = faults
    async with witnessed(stage):
        await stage.until(lambda: len(failed(stage)) == 4, "all are found")
        assert await ask_all(stage, emulate, 10) == {"-d0", "-d1"}


async def test_bytes_of_another_handoff_are_not_the_measure_of_later_ones(
    make_fleet, monkeypatch
) -> None:
    """Its bytes are counted before its tokens are, while the first canary runs."""
    stage, _ = await make_fleet({"p0": "prefill", "d0": "decode"})
    pages, fetch = itertools.count(), canary_module._fetch_counters

    async def fetch_with_another(context, decode):
        page, number = await fetch(context, decode), next(pages)
        num_bytes = page.num_bytes + (number > 0) * 1e12
        return replace(page, num_bytes=num_bytes, num_tokens=page.num_tokens + (number > 1) * 999)

    monkeypatch.setattr(canary_module, "_fetch_counters", fetch_with_another)
    async with witnessed(stage):
        await stage.until(lambda: stage.context.metrics.canaries["good"] > 3, "good canaries")
    assert stage.context.metrics.canaries.keys() == {"good"}
    assert not closed(stage)


async def test_one_odd_result_suspends_a_pair_until_two_good_ones(make_fleet) -> None:
    stage, engines = await make_fleet({"p0": "prefill", "d0": "decode"})
    async with witnessed(stage) as sent:
        await stage.until(lambda: are_proven(stage, 1), "it is proven")
        engines["p0"].engine.faults.apply(b'{"wrong_kv": 1}')
        await stage.until(
            lambda: any(p.proofs[0].trust == agent_pb2.TRUST_SUSPECT for _, p in sent), "suspended"
        )
        assert closed(stage) == {"p0-d0"}
        await stage.until(lambda: not closed(stage), "it is back")
        await asyncio.sleep(0.1)  # the last call to the agent
    seen = [proofs.proofs[0].trust for _, proofs in sent]
    suspect = seen.index(agent_pb2.TRUST_SUSPECT)
    assert seen[suspect : suspect + 3] == [
        agent_pb2.TRUST_SUSPECT,
        agent_pb2.TRUST_SUSPECT,
        agent_pb2.TRUST_PROVEN,
    ]


async def test_engines_that_fail_or_have_gone_prove_nothing_against_their_pairs(
    make_fleet,
) -> None:
    stage, engines = await make_fleet(FOUR, recomputes=True)
    await engines["d1"].stop()
    engines["p1"].engine.faults.apply(b'{"refuse": true}')
    async with witnessed(stage):
        await stage.until(
            lambda: stage.context.metrics.canaries["blurred"] >= 3, "canaries show nothing"
        )
        await stage.until(lambda: len(trusts(stage)) == 1, "one pair can be proven")
    assert trusts(stage) == {"p0-d0": agent_pb2.TRUST_PROVEN}


async def test_canaries_keep_to_their_share_of_each_engine(make_fleet) -> None:
    stage, _ = await make_fleet(FOUR, time_scale=0.3)
    async with witnessed(stage, share=0.001, period_s=0.05):
        await asyncio.sleep(6.0)
    spent_s = stage.context.metrics.canary_seconds
    # Of two engines each: what two minutes save, and a canary more than that.
    assert 0 < spent_s["prefill"] < 2 * (0.001 * (120 + 6) + 0.2)
    assert 0 < spent_s["decode"] < 2 * (0.001 * (120 + 6) + 0.2)


async def test_no_canary_starts_where_prompts_wait(make_fleet) -> None:
    stage, _ = await make_fleet({"p0": "prefill", "d0": "decode"})
    registry, router = stage.context.router.registry, stage.context.router
    pick = router.reserve(registry.instances["p0"], registry.instances["d0"], 500, 10)
    async with witnessed(stage, period_s=0.1):
        await asyncio.sleep(2.0)
        assert not any(stage.context.metrics.canaries.values())
        router.release(pick)
        await stage.until(lambda: are_proven(stage, 1), "it is proven")


async def test_a_fault_that_another_process_found_is_confirmed_or_refuted(make_fleet) -> None:
    stage, engines = await make_fleet(FOUR, recomputes=True)
    async with witnessed(stage):
        await stage.until(lambda: are_proven(stage, 4), "all are proven")
        for decode, fault in (("d0", None), ("d1", PairFault.LAYOUT)):
            engines[decode].engine.faults.pairs = {"boot-p0": fault} if fault else {}
            suspend(stage, "p0", decode)
        await stage.until(lambda: failed(stage) == {"p0-d1"}, "one is confirmed")
        await stage.until(lambda: closed(stage) == {"p0-d1"}, "the other is back")


def fill(stage, *, num_waiting: int = 0) -> None:
    """All KV caches are 60 % full."""
    for name, instance in stage.context.router.registry.instances.items():
        size = {"kv_block_size": 16, "kv_blocks_total": 1_000, "max_model_len": 2048}
        stage.state(stage.engines[name], engine_url=instance.target.engine_url, **size)
        instance.load.CopyFrom(
            agent_pb2.LoadReport(
                boot_id=instance.target.boot_id, kv_blocks_free=400, num_waiting=num_waiting
            )
        )


def suspend(stage, prefill: str, decode: str, trust: int = agent_pb2.TRUST_SUSPECT) -> None:
    """As an agent reports what another process has found."""
    proofs = agent_pb2.PairProofs(boot_id=f"boot-{decode}")
    proofs.proofs.add(prefill=prefill, prefill_boot_id=f"boot-{prefill}", trust=trust)
    registry = stage.context.router.registry
    registry.on_event(decode, agent_pb2.WatchEvent(pairs=proofs), stage.context.clock())


async def test_a_suspect_pair_is_tested_where_kv_caches_are_more_than_half_full(
    make_fleet,
) -> None:
    stage, _ = await make_fleet({"p0": "prefill", "d0": "decode"})
    fill(stage)
    suspend(stage, "p0", "d0")
    async with witnessed(stage):
        await stage.until(lambda: not closed(stage), "it is refuted")
    assert are_proven(stage, 1)


@pytest.mark.parametrize(
    ("trust", "expiry_s"), [(agent_pb2.TRUST_SUSPECT, 60), (agent_pb2.TRUST_FAILED, 600)]
)
async def test_a_closed_pair_that_is_never_tested_is_used_again_when_its_result_expires(
    make_fleet, monkeypatch, trust: int, expiry_s: int
) -> None:
    stage, _ = await make_fleet({"p0": "prefill", "d0": "decode"})
    fill(stage, num_waiting=1)
    start_s = now_s = stage.context.clock()
    suspend(stage, "p0", "d0", trust)

    async def send(*_: object) -> None:
        """Nothing is tested."""

    witness, registry = Witness(stage.context, 1.0, send), stage.context.router.registry
    monkeypatch.setattr(stage.context, "clock", lambda: now_s)
    (table,) = registry.list_tables()
    while now_s < start_s + 3 * expiry_s + 120:
        await witness.check(now_s)
        table.update_pairs(now_s)
        if not table.closed_pairs.count:
            break
        now_s += 5
    assert expiry_s <= now_s - start_s <= expiry_s + 100
    for _ in range(3):
        now_s += 5
        await witness.check(now_s)
        assert not table.closed_pairs.count
    assert not stage.context.metrics.canaries["reported"]


@pytest.mark.parametrize("restarted", ["p0", "d0"])
async def test_a_result_of_a_boot_that_has_ended_meanwhile_is_dropped(
    make_fleet, monkeypatch, restarted: str
) -> None:
    stage, engines = await make_fleet({"p0": "prefill", "d0": "decode"})

    async def restart_meanwhile(*_: object) -> NoReturn:
        url = engines[restarted].url
        stage.state(stage.engines[restarted], engine_url=url, boot_id=f"next-{restarted}")
        raise FaultyCanaryError("refused", "it has ended")

    monkeypatch.setattr(witness_module, "run_canary", restart_meanwhile)
    async with witnessed(stage, period_s=0.1) as sent:
        counted = stage.context.metrics.canaries
        await stage.until(lambda: counted["refused"], "a canary has failed")
    assert not sent
    assert not closed(stage)


async def test_a_restarted_gateway_knows_what_failed(make_fleet) -> None:
    stage, engines = await make_fleet(FOUR, recomputes=True)
    engines["d0"].engine.faults.pairs = {"boot-p0": PairFault.LAYOUT}
    async with witnessed(stage):
        await stage.until(lambda: failed(stage) == {"p0-d0"}, "it is found")
    async with witnessed(stage, period_s=30.0):
        await asyncio.sleep(1.0)
        assert closed(stage) == {"p0-d0"}
    assert Router(stage.context.router.registry).pick("m", 10).decode.instance in {"d0", "d1"}


async def test_prompts_fit_a_model_of_which_each_character_is_a_token(
    make_fleet, monkeypatch
) -> None:
    """The lengths are estimates, and a prompt that is too long would be refused each time."""
    monkeypatch.setattr(tokenizer, "_PIECE", re.compile(r"(?s)."))
    stage, _ = await make_fleet(FOUR, recomputes=True)
    async with witnessed(stage, share=1.0, period_s=20.0):
        await stage.until(lambda: are_proven(stage, 4), "all four pairs are proven")
    assert "blurred" not in stage.context.metrics.canaries


async def test_pairs_of_large_fleets_are_looked_at_in_turn(make_fleet, monkeypatch) -> None:
    monkeypatch.setattr(pair_list, "PAIRS_PER_TICK", 1)
    stage, _ = await make_fleet(FOUR, recomputes=True)
    async with witnessed(stage):
        await stage.until(lambda: are_proven(stage, 4), "all four pairs are proven")
