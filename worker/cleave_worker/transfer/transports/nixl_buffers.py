"""Staging buffers into which a consumer receives bytes over NIXL, shared by all its links.

NIXL cannot cancel a transfer: one that was abandoned may still write until it completes. What is
hard: until then its buffer must not be used for anything else. A buffer is therefore reused only
when all transfers into it are known to have completed. A buffer whose transfers failed is never
reused, and when all buffers are lost this way no transfer over NIXL starts any more.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from cleave_worker.transfer.memory import Memory, Span
from cleave_worker.transfer.transport import LinkError
from cleave_worker.transfer.transports.nixl_agent import Agent, Flight, Spot, State

_log = logging.getLogger(__name__)
PIECE_BYTES = 8 << 20
"""Bytes per transfer: enough for the full rate."""
_HALVES = 2
"""One half is unpacked while the other fills."""
_MOST = 16
"""256 MiB in total; further transfers wait for a free buffer."""
_LOOK_S = 0.01
"""Interval at which waiting threads poll the abandoned transfers."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer that one transfer of a link uses at a time."""

    memory: Memory
    _spot: Spot

    def spot(self, span: Span) -> Spot:
        """Describe a range of the buffer to NIXL."""
        return Spot(self._spot.address + span.offset, span.length, self._spot.device)


@dataclass(frozen=True, slots=True)
class _GivenUp:
    """A returned buffer into which transfers may still write."""

    buffer: Buffer
    flights: tuple[Flight, ...]
    peer: str


class Arrivals:
    """The buffers of a consumer and the NIXL agent that they are registered with; created on first
    use."""

    def __init__(self, name: str, device: torch.device) -> None:
        """`name`: unique among the agents of all engines."""
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
        """Return an agent that knows the peer of this name until `part`. Raises LinkError."""
        with self._changed:
            agent = self._agent = self._agent or self._new_agent()
            loaded = agent.meet(metadata)
            if loaded == name:
                self._uses[name] += 1
                return agent
            if not self._uses[loaded]:
                agent.part(loaded)
        raise LinkError(f"the producer's agent is {loaded!r}, not {name!r}")

    def part(self, name: str) -> None:
        """End one use of a peer's agent, which is removed after the last use."""
        with self._changed:
            self._part(name)

    def lend(self, peer: str, deadline: float) -> Buffer:
        """Return a buffer for one transfer; the caller must `give_back` it. Raises LinkError."""
        with self._changed:
            while True:
                self._look()
                buffer = self._free.pop() if self._free else self._made()
                if buffer:
                    self._uses[peer] += 1
                    return buffer
                if len(self._given_up) + len(self._lost) == _MOST:
                    raise LinkError(
                        f"all {_MOST} buffers belong to transfers that have not completed"
                    )
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise LinkError("no buffer became free in time")
                self._changed.wait(min(remaining, _LOOK_S) if self._given_up else remaining)

    def give_back(self, buffer: Buffer, handles: Iterable[Flight], peer: str) -> None:
        """Return a buffer after use; `handles`: all transfers that were posted and may not have
        completed."""
        with self._changed:
            self._given_up.append(_GivenUp(buffer, tuple(handles), peer))
            self._look()

    def _new_agent(self) -> Agent:
        """Create the agent; a failure is remembered, not retried. Raises LinkError."""
        if self._fault:
            raise LinkError(self._fault)
        try:
            return Agent(self._name, self._device, answers=False)
        except LinkError as error:
            self._fault = str(error)
            raise

    def _look(self) -> None:
        """Free the buffers whose transfers have completed."""
        busy: list[_GivenUp] = []
        for entry in self._given_up:
            states = [handle.look() for handle in entry.flights]
            if State.UNDER_WAY in states:
                busy.append(entry)
                continue
            self._part(entry.peer)
            if State.FAILED in states:
                self._lost.append(entry.buffer)
                _log.warning(
                    "a transfer from %s failed: its buffer is not reused (%d of %d)",
                    *(entry.peer, len(self._lost), _MOST),
                )
            else:
                self._free.append(entry.buffer)
            self._changed.notify()
        self._given_up = busy
        # Keeps the buffers alive, even if the consumer itself is garbage, while they may be
        # written.
        (_written_to.add if busy or self._lost else _written_to.discard)(self)

    def _made(self) -> Buffer | None:
        if self._num_made == _MOST:
            return None
        assert self._agent, "no remote agent was added"
        size = _HALVES * PIECE_BYTES
        memory = Memory([torch.empty(size, dtype=torch.uint8, device=self._device)])
        (descriptor,) = self._agent.register(memory)
        self._num_made += 1
        return Buffer(memory, descriptor)

    def _part(self, name: str) -> None:
        self._uses[name] -= 1
        if not self._uses[name] and self._agent:
            del self._uses[name]
            self._agent.part(name)


_written_to: set[Arrivals] = set()
