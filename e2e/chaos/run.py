"""Runs load and faults against a fleet, burst by burst, and looks after each what is left.

What is hard: faults overlap, and must not add up to a fleet that cannot serve. So a
fault that takes an instance away waits until enough others are there.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import psutil

from e2e.chaos.beat import Beat
from e2e.chaos.faults import (
    CRIPPLING,
    FIRST_OF_PAIRS,
    FLEET,
    FLEET_KINDS,
    GATEWAY_KINDS,
    MACHINE_KINDS,
    ONE_PROCESS,
    Fault,
)
from e2e.chaos.gateway_faults import inflicted_on_gateway
from e2e.chaos.gateways import Gateway
from e2e.chaos.invariants import Baseline, find_leftovers
from e2e.chaos.load import Load, Record
from e2e.chaos.machine import Machine
from e2e.chaos.machine_faults import count_poisoned, inflicted_on_fleet
from e2e.chaos.verdict import Case, Seen
from e2e.chaos.worker_faults import Worker, inflicted
from e2e.support.deployments import Deployment

LOOK_S = 0.2
BEFORE_S = 8.0
"""How long before a request a fault may have ended and still concern it."""


POISON_ENDS = 2
"""Engines that a request may end, as `docs/serve.md` states."""
POISON_ENDS_UNSEEN = 6
"""The same while agents cannot report that their engines have ended: all attempts."""
AGENT_FAULTS = frozenset(("hang agent", "kill agent", "kill worker", "cut agent", "cut worker"))
LOSSES = frozenset((Case.ENGINES_FAILED, Case.NO_INSTANCE, Case.NOT_RESUMABLE))
TAKING_ENGINES = CRIPPLING | FIRST_OF_PAIRS | {"poison request"}
"""Faults that end, silence or fail engines, without which no such loss is documented."""
BUSY_SHARE = 0.5
"""A machine that gives a run less than this of the processor time it asks for delays reports."""
RECENT_EVENTS = 64
MOST_LOSSES = 20
SHOWN_BYTES = 2_048
"""Of either end of an answer that is wrong."""


class ViolationError(Exception):
    """Something that must always hold did not."""


@dataclass
class Event:
    """A fault that has happened."""

    fault: Fault
    victim: str
    began_s: float
    ended_s: float = float("inf")

    def describe(self, zero_s: float) -> str:
        fault = self.fault
        ended = f"{self.ended_s - zero_s:.2f}" if self.ended_s < float("inf") else "..."
        return (
            f"{self.began_s - zero_s:8.2f} - {ended:>8} s  #{fault.number} {fault.kind}: "
            f"{self.victim} (amount {fault.amount})"
        )


@dataclass
class Storm:
    """One run."""

    deployment: Deployment
    machine: Machine
    gateways: Sequence[Gateway]
    roles: dict[str, str]
    load: Load
    baseline: Baseline
    report_fault: Callable[[str, int], None]
    """Progress: what happens, faults so far."""
    serving_left: int = 2
    """Instances that decode which no fault takes away."""
    wait_s: float = 120.0
    """For a fleet that can bear a fault, and for one that is whole again, by the run's beat."""
    back_s: float = 60.0
    """Until an engine that a fault has ended may serve again."""
    lasting_s: float = float("inf")
    """No fault begins later than this."""
    beat: Beat = field(default_factory=Beat)
    zero_s: float = field(default_factory=time.monotonic)
    events: list[Event] = field(default_factory=list)
    missed: Counter[str] = field(default_factory=Counter)
    """Faults whose victim was gone before they could happen, by kind."""
    touched: dict[str, Counter[str]] = field(default_factory=dict)
    """Kind of fault -> case -> requests that ran while one lasted."""
    losses: list[str] = field(default_factory=list)
    """The first requests that were lost as documented, and the faults around them."""
    _agents: dict[str, psutil.Process] = field(default_factory=dict)
    _away: Counter[str] = field(default_factory=Counter)
    _running: set[asyncio.Task[None]] = field(default_factory=set)
    _failed: str = ""
    """Why somebody did not come back."""

    def __post_init__(self) -> None:
        self.load.on_record = self._note

    async def run(self, faults: Sequence[Fault], burst: int) -> None:
        """All faults, so many between two looks. Raises ViolationError."""
        for start in range(0, len(faults), burst):
            if self._is_over:
                return
            self.load.start()
            try:
                for fault in faults[start : start + burst]:
                    if self._is_over:
                        break
                    await asyncio.sleep(fault.gap_s)
                    await self._begin(fault)
                    self._must_be_right()
                await asyncio.gather(*self._running)
            finally:
                await self.load.stop()
                await asyncio.gather(*self._running, return_exceptions=True)
            self._must_be_right()
            await self.settle()

    async def settle(self) -> None:
        """Wait until everything is whole and free again. Raises ViolationError with what is not."""
        end_s = self.beat.look() + self.wait_s
        while left := await asyncio.to_thread(
            find_leftovers, self.deployment, self.gateways, set(self.roles), self.baseline
        ):
            if self.beat.look() > end_s:
                raise ViolationError(
                    "left when all was over: " + "; ".join(left) + self._describe_all()
                )
            await asyncio.sleep(LOOK_S)
        self._check_poisoned()

    @property
    def _is_over(self) -> bool:
        return time.monotonic() - self.zero_s > self.lasting_s

    @property
    def happened(self) -> Counter[str]:
        """Faults by kind."""
        return Counter(event.fault.kind for event in self.events)

    async def _begin(self, fault: Fault) -> None:
        victim = await self._find_victim(fault)
        self.beat.look()
        self.report_fault(f"{fault.kind}: {victim}", fault.number)
        if fault.cripples:
            self._away[victim] += 1
        task = asyncio.create_task(self._last(fault, victim))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _last(self, fault: Fault, victim: str) -> None:
        event = Event(fault, victim, time.monotonic())
        try:
            await asyncio.to_thread(self._inflict, fault, victim, event)
        except AssertionError as error:
            self._failed = f"{fault.kind} of {victim}: {error}"
        except (psutil.Error, httpx.HTTPError, LookupError, ValueError, OSError):
            # An earlier fault's restart came in between: there was no victim.
            self.missed[fault.kind] += 1
            self.events.remove(event)
        finally:
            event.ended_s = time.monotonic()
            if fault.cripples:
                self._away[victim] -= 1

    def _inflict(self, fault: Fault, victim: str, event: Event) -> None:
        self.events.append(event)
        with self._open(fault, victim):
            time.sleep(fault.seconds)

    @contextmanager
    def _open(self, fault: Fault, victim: str) -> Iterator[None]:
        if fault.kind in GATEWAY_KINDS:
            (gateway,) = [g for g in self.gateways if g.name == victim]
            with inflicted_on_gateway(fault, gateway):
                yield
        elif victim == FLEET:
            with inflicted_on_fleet(fault, self.deployment, self.gateways, self.machine):
                yield
        else:
            with inflicted(fault, Worker(self._find_agent(victim))):
                yield

    def _find_agent(self, name: str) -> psutil.Process:
        """Found once for each of its lives: the search looks at every process of the machine."""
        if name not in self._agents or not self._agents[name].is_running():
            self._agents[name] = self.deployment.agent(name)
        return self._agents[name]

    async def _find_victim(self, fault: Fault) -> str:
        end_s = self.beat.look() + self.wait_s
        while True:
            allowed = await self._find_allowed(fault)
            for victim in fault.victims:
                if victim in allowed:
                    return victim
            if self.beat.look() > end_s:
                raise ViolationError(
                    f"no victim for {fault.kind} within {self.wait_s:.0f} s" + self._describe_all()
                )
            self._must_be_right()
            await asyncio.sleep(LOOK_S)

    async def _find_allowed(self, fault: Fault) -> list[str]:
        """To whom it may happen now."""
        if fault.kind in MACHINE_KINDS:
            return [FLEET]
        if fault.kind in GATEWAY_KINDS:
            reachable = [gateway.name for gateway in self.gateways if gateway.reachable]
            return reachable if len(reachable) > 1 or fault.kind in ONE_PROCESS else []
        serving = await asyncio.to_thread(self._find_serving)
        if fault.kind in FLEET_KINDS:
            decoding = [name for name in serving if self.roles[name] != "prefill"]
            return [FLEET] if len(decoding) >= self._decoding_for_poison else []
        return [name for name in serving if self._can_spare(name, serving, fault)]

    @property
    def _decoding_for_poison(self) -> int:
        """How many must serve before a request may end some: a small fleet needs all of them."""
        decoding = sum(role != "prefill" for role in self.roles.values())
        return min(self.serving_left + POISON_ENDS, decoding)

    def _find_serving(self) -> set[str]:
        """Instances that every gateway can use and no fault has taken away."""
        found = set(self.roles)
        for gateway in self.gateways:
            if gateway.reachable:
                try:
                    instances = gateway.fleet().instances
                except httpx.TransportError:
                    continue
                found &= {i.name for i in instances if i.selectable and i.kv_path.verified}
        return {name for name in found if not self._away[name]}

    def _can_spare(self, victim: str, serving: set[str], fault: Fault) -> bool:
        if not fault.cripples:
            return True
        left = serving - {victim}
        decoding = [name for name in left if self.roles[name] != "prefill"]
        return bool(left) and len(decoding) >= self.serving_left

    def _note(self, record: Record) -> None:
        """A request is over: which faults lasted while it ran, and do they excuse its loss?"""
        seen, case = record.seen, record.verdict.case
        if case in LOSSES:
            near = self._find_near(seen, self.back_s)
            if not any(event.fault.kind in TAKING_ENGINES for event in near):
                self._failed = "no fault concerned an engine: " + self._explain(record)
            if len(self.losses) < MOST_LOSSES:
                self.losses.append(self._explain(record))
        for event in self.events[-RECENT_EVENTS:]:
            if event.began_s <= seen.ended_s and event.ended_s >= seen.began_s:
                cases = self.touched.setdefault(event.fault.kind, Counter())
                cases[case.name] += 1

    def _find_near(self, seen: Seen, before_s: float = BEFORE_S) -> list[Event]:
        """Faults that may concern a request, over for `before_s` at most when it began."""
        return [
            event
            for event in self.events
            if event.began_s <= seen.ended_s and event.ended_s >= seen.began_s - before_s
        ]

    def _check_poisoned(self) -> None:
        """Raises ViolationError when requests have ended more engines than they may."""
        allowed = sum(
            POISON_ENDS_UNSEEN if self._hides_ends(event) else POISON_ENDS
            for event in self.events
            if event.fault.kind == "poison request"
        )
        if (ended := count_poisoned(self.deployment)) > allowed:
            raise ViolationError(
                f"requests ended {ended} engines, {allowed} at most are documented"
                + self._describe_all()
            )

    def _hides_ends(self, poison: Event) -> bool:
        """Whether agents could not report in time what it did."""
        span = poison.began_s - BEFORE_S, poison.ended_s
        return self.beat.find_least_share(*span) < BUSY_SHARE or any(
            event.fault.kind in AGENT_FAULTS
            and event.began_s <= span[1]
            and event.ended_s >= span[0]
            for event in self.events
        )

    def _must_be_right(self) -> None:
        if self._failed:
            raise ViolationError(self._failed + self._describe_all())
        if self.load.tally.wrong:
            raise ViolationError(self._explain(self.load.tally.wrong[0]))

    def _explain(self, record: Record) -> str:
        """The smallest history that shows what happened around a request."""
        seen = record.seen
        near = [event.describe(self.zero_s) for event in self._find_near(seen)]
        began, ended = seen.began_s - self.zero_s, seen.ended_s - self.zero_s
        request = (
            f"request {record.ask.name} on {record.ask.path} through {seen.gateway}, "
            f"{began:.2f} - {ended:.2f} s, status {seen.status}, {', '.join(seen.instances)}: "
            f"{record.verdict.reason}"
        )
        lines = [
            request,
            f"asked: {record.ask.body}",
            f"came: {shorten(seen.body)}",
            f"the connection broke: {seen.broken or 'no'}",
            "faults around it:",
            *near,
        ]
        return "\n".join(lines)

    def _describe_all(self) -> str:
        return "\nthe last faults:\n" + "\n".join(
            e.describe(self.zero_s) for e in self.events[-20:]
        )


def shorten(body: bytes) -> str:
    """A body as a report shows it: its first and last bytes, which are all of a short one."""
    left_out = len(body) - 2 * SHOWN_BYTES
    if left_out <= 0:
        return repr(body)
    return f"{body[:SHOWN_BYTES]!r} ... {left_out} bytes ... {body[-SHOWN_BYTES:]!r}"
