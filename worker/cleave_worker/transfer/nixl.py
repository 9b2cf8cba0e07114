"""One-sided link over NIXL: InfiniBand, RoCE or NVLink, as its UCX finds them between two engines.

An owner registers its regions with an agent of its own and tells readers where they lie; a reader's
agent reads them without the owner's engine. What is hard is told in arrivals.py: bytes arrive in a
buffer, and only those of a transfer that is over are moved on.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch

from cleave_worker.transfer.agents import Agent, Flight, Spot, State, installed
from cleave_worker.transfer.arrivals import PIECE_BYTES, Arrivals, Buffer
from cleave_worker.transfer.link import LinkError, Way
from cleave_worker.transfer.memory import Memory, Move, Span, packed, pieces

_log = logging.getLogger(__name__)
_POLL_S = 0.0002
"""Between two looks at a piece; while it sleeps other threads of the engine run."""
_ONE_BYTE = Span(0, 0, 1)
_CARDS = Path("/sys/class/infiniband")
"""Those that read memory by themselves, RoCE's among them."""

Begin = Callable[[str, Sequence[Spot], Sequence[Spot]], Flight]
"""Agent.read or Agent.write."""


class Reach(msgspec.Struct, frozen=True):
    """How a reader gets at an owner's regions."""

    metadata: bytes
    """Of the owner's agent."""
    starts: tuple[int, ...]
    """Addresses of the regions."""
    device: int
    """That they are on."""


def usual(device: torch.device) -> tuple[Way, ...]:
    """What to try, best first, with KV on this device: 026 says why."""
    has_cards = _CARDS.is_dir() and any(_CARDS.iterdir())
    nixl = (Way.NIXL,) if has_cards else ()
    return (Way.SHARED_MEMORY, *nixl, Way.GLOO) if device.type == "cpu" else (*nixl, Way.NCCL)


def usable(ways: Sequence[Way]) -> tuple[Way, ...]:
    """Those that can be tried here. Raises ValueError when there is none."""
    if Way.NIXL not in ways or installed():
        return tuple(ways)
    left = tuple(way for way in ways if way is not Way.NIXL)
    if not left:
        raise ValueError("ways: nixl is not installed here: install it, or name other ways")
    _log.info("NIXL is not installed: KV moves over %s", " or ".join(left))
    return left


def agent_name(boot_id: str, rank: int) -> str:
    """What the agent of an owner's rank is called."""
    return f"{boot_id}/{rank}"


class Served:
    """An owner's regions, registered when the first reader asks for them."""

    def __init__(self, name: str, memory: Memory) -> None:
        """`name`: as agent_name has it."""
        self._name = name
        self._memory = memory
        self._agent: Agent | None = None
        self._reach: Reach | None = None
        self._tried = False
        self._lock = threading.Lock()

    def reach(self) -> Reach | None:
        """What to tell a reader; None: NIXL does not work here, which is logged once."""
        with self._lock:
            if not self._tried:
                self._tried = True
                try:
                    self._reach = self._register()
                except LinkError as error:
                    _log.warning("KV is not served over NIXL: %s", error)
            return self._reach

    def _register(self) -> Reach:
        self._agent = Agent(self._name, self._memory.regions[0].device, answers=True)
        spots = self._agent.register(self._memory)
        starts = tuple(spot.address for spot in spots)
        return Reach(self._agent.metadata(), starts, spots[0].device)


class Nixl:
    """A OneSided link, used by one thread at a time; any may close it."""

    way = Way.NIXL

    def __init__(
        self, local: Memory, arrivals: Arrivals, reach: Reach, name: str, seconds: float
    ) -> None:
        """Reads a byte, for who can be met is not always reached. Raises LinkError.

        `name`: of the only agent that is meant.
        """
        self._local = local
        self._arrivals = arrivals
        self._reach = reach
        self.name = name
        self.is_closed = False
        self._lock = threading.Lock()
        byte = Memory([torch.empty(1, dtype=torch.uint8, device=local.regions[0].device)])
        self._agent = arrivals.meet(reach.metadata, name)
        self._read(byte, [Move(_ONE_BYTE, _ONE_BYTE)], seconds)

    def read(self, moves: Iterable[Move], seconds: float) -> None:
        """Move one piece on while the next one comes. Raises LinkError."""
        self._read(self._local, moves, seconds)

    def write(self, moves: Iterable[Move], seconds: float) -> None:
        """Pack a piece and have it moved, one after the other. Raises LinkError."""
        with self._loan(time.monotonic() + seconds) as loan:
            for theirs, ours in _cut(moves):
                loan.pack(self._local, ours)
                loan.wait(loan.begin(self._agent.write, 0, theirs))

    def close(self) -> None:
        """Forget the peer, as soon as nothing comes from it any more."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
        self._arrivals.part(self.name)

    def spot(self, span: Span) -> Spot:
        """A span of the owner's as NIXL names it."""
        start = self._reach.starts[span.region]
        return Spot(start + span.offset, span.length, self._reach.device)

    def _read(self, target: Memory, moves: Iterable[Move], seconds: float) -> None:
        with self._loan(time.monotonic() + seconds) as loan:
            coming: tuple[Flight, int, list[Span]] | None = None
            for number, (theirs, ours) in enumerate(_cut(moves)):
                half = number % 2
                begun = loan.begin(self._agent.read, half, theirs)
                if coming:
                    loan.land(target, *coming)
                coming = (begun, half, ours)
            if coming:
                loan.land(target, *coming)

    @contextmanager
    def _loan(self, deadline: float) -> Iterator["_Loan"]:
        """A buffer for one transfer; a link whose transfer fails is closed."""
        try:
            buffer = self._arrivals.lend(self.name, deadline)
            loan = _Loan(self, buffer, deadline)
            try:
                yield loan
            finally:
                self._arrivals.give_back(buffer, loan.flights, self.name)
        except (LinkError, ValueError, IndexError, RuntimeError) as error:
            self.close()
            raise LinkError(f"over NIXL: {error}") from error


class _Loan:
    """A buffer, and what is under way in its two halves."""

    def __init__(self, link: Nixl, buffer: Buffer, deadline: float) -> None:
        self._link = link
        self._buffer = buffer
        self._deadline = deadline
        self.flights: list[Flight] = []
        """Those not known to be over."""

    def begin(self, do: Begin, half: int, theirs: Sequence[Span]) -> Flight:
        """Have a piece moved between the owner's spans and a half."""
        here = [self._buffer.spot(place) for place in _places(theirs, half)]
        flight = do(self._link.name, here, [self._link.spot(span) for span in theirs])
        self.flights.append(flight)
        return flight

    def wait(self, flight: Flight) -> None:
        """Until it is over. Raises LinkError."""
        while (state := flight.look()) is State.UNDER_WAY:
            if self._link.is_closed:
                raise LinkError("the link was closed")
            if time.monotonic() > self._deadline:
                raise LinkError("bytes did not come in time")
            time.sleep(_POLL_S)
        if state is State.FAILED:
            raise LinkError("the peer is not reached any more")
        self.flights.remove(flight)

    def land(self, target: Memory, flight: Flight, half: int, ours: Sequence[Span]) -> None:
        """Wait for a piece and move it on."""
        self.wait(flight)
        target.fill(self._buffer.memory, zip(ours, _places(ours, half), strict=True))
        # Before anything else comes into this half, and before the engine computes with it.
        _settle(target)

    def pack(self, source: Memory, ours: Sequence[Span]) -> None:
        """Fill the first half."""
        self._buffer.memory.fill(source, zip(_places(ours, 0), ours, strict=True))
        _settle(source)


def _places(piece: Sequence[Span], half: int) -> list[Span]:
    return packed(piece, half * PIECE_BYTES)


def _cut(moves: Iterable[Move]) -> Iterator[tuple[list[Span], list[Span]]]:
    """Pieces as they lie there and here."""
    there, here = itertools.tee(moves)
    return zip(
        pieces((move.remote for move in there), PIECE_BYTES),
        pieces((move.local for move in here), PIECE_BYTES),
        strict=True,
    )


def _settle(memory: Memory) -> None:
    """Wait for copies of this thread: on a GPU they are only begun."""
    device = memory.regions[0].device
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
