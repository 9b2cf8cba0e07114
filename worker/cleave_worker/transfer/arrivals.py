"""Buffers in which a reader's bytes arrive over NIXL, shared by all its links.

A transfer that was given up may write until it is over, whenever that is, and nobody can end it.
What is hard: the memory it writes to must not be anybody else's by then. A buffer is therefore lent
again only when all transfers into it are known to be over; one of which that is never known stays
unused for ever, and with too many of those nothing is lent any more.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from cleave_worker.transfer.agents import Agent, Flight, Spot, State
from cleave_worker.transfer.link import LinkError
from cleave_worker.transfer.memory import Memory, Span

_log = logging.getLogger(__name__)
PIECE_BYTES = 8 << 20
"""Moved at a time: enough for the full rate."""
_HALVES = 2
"""One is moved on while the other fills."""
_MOST = 16
"""256 MiB; further transfers wait for one."""
_LOOK_S = 0.01
"""Between two looks at what was given up, by those who wait for a buffer."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Lent to one transfer of a link at a time."""

    memory: Memory
    _spot: Spot

    def spot(self, span: Span) -> Spot:
        """A span of it as NIXL names it."""
        return Spot(self._spot.address + span.offset, span.length, self._spot.device)


@dataclass(frozen=True, slots=True)
class _GivenUp:
    """A buffer that transfers may still write to."""

    buffer: Buffer
    flights: tuple[Flight, ...]
    peer: str


class Arrivals:
    """A reader's buffers and the agent that they are registered with, made when first needed."""

    def __init__(self, name: str, device: torch.device) -> None:
        """`name`: no other agent's of any engine."""
        self._name = name
        self._device = device
        self._agent: Agent | None = None
        self._fault = ""
        self._free: list[Buffer] = []
        self._given_up: list[_GivenUp] = []
        self._lost: list[Buffer] = []
        self._num_made = 0
        self._uses: Counter[str] = Counter()
        self._changed = threading.Condition()

    def meet(self, metadata: bytes, name: str) -> Agent:
        """An agent that knows the peer of this name until `part`. Raises LinkError."""
        with self._changed:
            agent = self._agent = self._agent or self._new_agent()
            met = agent.meet(metadata)
            if met == name:
                self._uses[name] += 1
                return agent
            if not self._uses[met]:
                agent.part(met)
        raise LinkError(f"the owner's agent is {met!r}, not {name!r}")

    def part(self, name: str) -> None:
        """One use less of a peer, which is forgotten after the last one."""
        with self._changed:
            self._part(name)

    def lend(self, peer: str, deadline: float) -> Buffer:
        """A buffer for one transfer with a peer, to be given back. Raises LinkError."""
        with self._changed:
            while True:
                self._look()
                buffer = self._free.pop() if self._free else self._made()
                if buffer:
                    self._uses[peer] += 1
                    return buffer
                if len(self._given_up) + len(self._lost) == _MOST:
                    raise LinkError(f"{_MOST} transfers have not ended: all buffers are theirs")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise LinkError("no buffer was free in time")
                self._changed.wait(min(left, _LOOK_S) if self._given_up else left)

    def give_back(self, buffer: Buffer, flights: Iterable[Flight], peer: str) -> None:
        """After use; `flights`: all that were begun."""
        with self._changed:
            self._given_up.append(_GivenUp(buffer, tuple(flights), peer))
            self._look()

    def _new_agent(self) -> Agent:
        """Tried once. Raises LinkError."""
        if self._fault:
            raise LinkError(self._fault)
        try:
            return Agent(self._name, self._device, answers=False)
        except LinkError as error:
            self._fault = str(error)
            raise

    def _look(self) -> None:
        """Take back what is over."""
        still: list[_GivenUp] = []
        for one in self._given_up:
            states = [flight.look() for flight in one.flights]
            if State.UNDER_WAY in states:
                still.append(one)
                continue
            self._part(one.peer)
            if State.FAILED in states:
                self._lost.append(one.buffer)
                _log.warning(
                    "a transfer from %s failed: its buffer is set aside, %d of %d are",
                    *(one.peer, len(self._lost), _MOST),
                )
            else:
                self._free.append(one.buffer)
            self._changed.notify()
        self._given_up = still
        # Whoever forgets this reader must not free what is written to.
        (_written_to.add if still or self._lost else _written_to.discard)(self)

    def _made(self) -> Buffer | None:
        if self._num_made == _MOST:
            return None
        assert self._agent, "nobody has been met"
        size = _HALVES * PIECE_BYTES
        memory = Memory([torch.empty(size, dtype=torch.uint8, device=self._device)])
        (spot,) = self._agent.register(memory)
        self._num_made += 1
        return Buffer(memory, spot)

    def _part(self, name: str) -> None:
        self._uses[name] -= 1
        if not self._uses[name] and self._agent:
            del self._uses[name]
            self._agent.part(name)


_written_to: set[Arrivals] = set()
