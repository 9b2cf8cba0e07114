"""Clients that send requests all the time and check each answer."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp

from e2e.chaos.gateways import Gateway
from e2e.chaos.requests import Ask
from e2e.chaos.verdict import Case, Seen, Verdict, check_answer

LONGEST_S = 150.0
"""Of one request, all waits for instances included."""
THINK_S = 0.1
AWAY_S = 0.3
"""Before a client looks for its gateway again."""
LEAVES = 0.05
"""Share of requests whose client goes away in the middle."""

Draw = Callable[[random.Random, str], Ask]
"""Makes a request of that name."""


@dataclass
class Record:
    """One request that is over."""

    ask: Ask
    seen: Seen
    verdict: Verdict


@dataclass
class Tally:
    """What clients saw."""

    cases: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    """Of documented failures."""
    wrong: list[Record] = field(default_factory=list)
    left: int = 0
    """Requests that their clients broke off."""
    worst_pause_s: float = 0.0
    worst_first_s: float = 0.0
    """Of answers that came right, to their first byte."""

    @property
    def requests(self) -> int:
        return sum(self.cases.values()) + self.left

    def add(self, record: Record) -> None:
        seen, case = record.seen, record.verdict.case
        self.cases[case.name] += 1
        if case is Case.RIGHT:
            self.worst_pause_s = max(self.worst_pause_s, seen.pause_s)
            self.worst_first_s = max(self.worst_first_s, seen.first_s - seen.began_s)
        elif case is Case.WRONG:
            self.wrong.append(record)
        else:
            self.reasons[f"{case.name}: {record.verdict.reason[:160]}"] += 1


class Load:
    """So many clients, each of which asks again as soon as it has its answer."""

    def __init__(self, gateways: Sequence[Gateway], draw: Draw, clients: int, seed: int) -> None:
        self._gateways = gateways
        self._draw = draw
        self._clients = clients
        self._seed = seed
        self._round = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._going = False
        self.tally = Tally()
        self.on_record: Callable[[Record], None] | None = None
        """Called with each request that is over."""

    def start(self) -> None:
        self._going, self._round = True, self._round + 1
        self._tasks = [asyncio.create_task(self._live(n)) for n in range(self._clients)]

    async def stop(self) -> None:
        """No further requests; returns when all answers have come."""
        self._going = False
        await asyncio.gather(*self._tasks)

    async def _live(self, number: int) -> None:
        rng = random.Random(f"{self._seed}/{self._round}/{number}")
        num_sent = 0
        timeout = aiohttp.ClientTimeout(total=LONGEST_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while self._going:
                num_sent += 1
                ask = self._draw(rng, f"{self._round}-{number}-{num_sent}")
                gateway, leaves = rng.choice(self._gateways), rng.random() < LEAVES
                await asyncio.sleep(rng.random() * THINK_S)
                if not gateway.alive:
                    await asyncio.sleep(AWAY_S)
                elif leaves:
                    self.tally.left += 1
                    await leave(session, gateway, ask, rng.random())
                else:
                    record = await self._ask(session, gateway, ask)
                    self.tally.add(record)
                    if self.on_record is not None:
                        self.on_record(record)

    async def _ask(self, session: aiohttp.ClientSession, gateway: Gateway, ask: Ask) -> Record:
        seen = Seen(time.monotonic(), gateway.name)
        try:
            await receive(session, gateway, ask, seen)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            seen.broken = f"{type(error).__name__} {error}"
        seen.ended_s = time.monotonic()
        span = seen.began_s, seen.ended_s
        verdict = check_answer(ask, seen, gateway.was_down(*span), gateway.was_full(*span))
        return Record(ask, seen, verdict)


async def receive(session: aiohttp.ClientSession, gateway: Gateway, ask: Ask, seen: Seen) -> None:
    """Ask and note what comes."""
    async with session.post(
        gateway.url + ask.path, json=ask.body, headers=headers(gateway, ask)
    ) as response:
        seen.status = response.status
        names = (response.headers.get(f"x-cleave-{role}", "") for role in ("prefill", "decode"))
        seen.instances = tuple(filter(None, names))
        last_s = 0.0
        async for piece in response.content.iter_any():
            now = time.monotonic()
            if last_s:
                seen.pause_s = max(seen.pause_s, now - last_s)
            else:
                seen.first_s = now
            last_s = now
            seen.body += piece


async def leave(session: aiohttp.ClientSession, gateway: Gateway, ask: Ask, after_s: float) -> None:
    """Ask, and go away without the answer unless it comes soon."""
    seen = Seen(time.monotonic())
    try:
        async with asyncio.timeout(after_s):
            await receive(session, gateway, ask, seen)
    except (aiohttp.ClientError, TimeoutError, OSError):
        pass


def headers(gateway: Gateway, ask: Ask) -> dict[str, str]:
    if not gateway.keys:
        return {}
    key = gateway.keys[len(ask.name) % len(gateway.keys)]
    return {"Authorization": f"Bearer {key}"}
