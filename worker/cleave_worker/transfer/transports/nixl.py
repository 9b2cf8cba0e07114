"""One-sided link over NIXL: InfiniBand, RoCE or NVLink, whichever its UCX finds between two
engines.

A producer registers its regions with an agent and sends their addresses to consumers, whose agents
read them without the producer's engine. What is hard is in `Arrivals`: bytes arrive in a staging
buffer and are unpacked only after their transfer has completed.
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

from cleave_worker.transfer.memory import Memory, Move, Span, packed, pieces
from cleave_worker.transfer.transport import LinkError, Way
from cleave_worker.transfer.transports.nixl_agent import Agent, Flight, Spot, State, installed
from cleave_worker.transfer.transports.nixl_buffers import PIECE_BYTES, Arrivals, Buffer

_log = logging.getLogger(__name__)
_POLL_S = 0.0002
"""Poll interval of a transfer; meanwhile other threads of the engine run."""
_ONE_BYTE = Span(0, 0, 1)
_CARDS = Path("/sys/class/infiniband")
"""RDMA devices, including those for RoCE."""

Begin = Callable[[str, Sequence[Spot], Sequence[Spot]], Flight]
"""`Agent.read` or `Agent.write`."""


class Reach(msgspec.Struct, frozen=True):
    """How a consumer reads a producer's regions."""

    metadata: bytes
    """Metadata of the producer's agent."""
    starts: tuple[int, ...]
    """Start address of each region."""
    device: int
    """Device id of the regions."""


def usual(device: torch.device) -> tuple[Way, ...]:
    """Return the default transports for KV on this device, best first; decision 026 gives
    reasons."""
    has_cards = _CARDS.is_dir() and any(_CARDS.iterdir())
    nixl = (Way.NIXL,) if has_cards else ()
    return (Way.SHARED_MEMORY, *nixl, Way.GLOO) if device.type == "cpu" else (*nixl, Way.NCCL)


def usable(transports: Sequence[Way]) -> tuple[Way, ...]:
    """Return the transports that can be used on this machine. Raises ValueError when none can."""
    if Way.NIXL not in transports or installed():
        return tuple(transports)
    available = tuple(transport for transport in transports if transport is not Way.NIXL)
    if not available:
        raise ValueError("ways: nixl is not installed: install it, or name other transports")
    _log.info("NIXL is not installed: KV is transferred over %s", " or ".join(available))
    return available


def agent_name(boot_id: str, rank: int) -> str:
    """Return the agent name of a producer's rank."""
    return f"{boot_id}/{rank}"


class Served:
    """A producer's regions, registered with NIXL when the first consumer asks for them."""

    def __init__(self, name: str, memory: Memory) -> None:
        """`name`: from `agent_name`."""
        self._name = name
        self._memory = memory
        self._agent: Agent | None = None
        self._reach: Reach | None = None
        self._tried = False
        self._lock = threading.Lock()

    def reach(self) -> Reach | None:
        """Return the metadata for consumers; None when NIXL fails here, which is logged once."""
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
        descriptors = self._agent.register(self._memory)
        starts = tuple(descriptor.address for descriptor in descriptors)
        return Reach(self._agent.metadata(), starts, descriptors[0].device)


class Nixl:
    """A OneSided link; one thread uses it at a time, any thread may close it."""

    way = Way.NIXL

    def __init__(
        self,
        local: Memory,
        staging_buffers: Arrivals,
        remote_metadata: Reach,
        remote_agent: str,
        seconds: float,
    ) -> None:
        """Read one byte as a test, as loaded metadata does not prove reachability. Raises
        LinkError.

        `name`: the name that the remote agent must have.
        """
        self._local = local
        self._arrivals = staging_buffers
        self._reach = remote_metadata
        self.name = remote_agent
        self.is_closed = False
        self._lock = threading.Lock()
        byte = Memory([torch.empty(1, dtype=torch.uint8, device=local.regions[0].device)])
        self._agent = staging_buffers.meet(remote_metadata.metadata, remote_agent)
        self._read(byte, [Move(_ONE_BYTE, _ONE_BYTE)], seconds)

    def read(self, moves: Iterable[Move], seconds: float) -> None:
        """Unpack one chunk while the next one arrives. Raises LinkError."""
        self._read(self._local, moves, seconds)

    def write(self, moves: Iterable[Move], seconds: float) -> None:
        """Pack and send one chunk after the other. Raises LinkError."""
        with self._loan(time.monotonic() + seconds) as lease:
            for remote, local in _cut(moves):
                lease.pack(self._local, local)
                lease.wait(lease.begin(self._agent.write, 0, remote))

    def close(self) -> None:
        """Remove the remote agent as soon as none of its transfers are pending."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
        self._arrivals.part(self.name)

    def spot(self, span: Span) -> Spot:
        """Describe a remote range to NIXL."""
        start = self._reach.starts[span.region]
        return Spot(start + span.offset, span.length, self._reach.device)

    def _read(self, target: Memory, moves: Iterable[Move], seconds: float) -> None:
        with self._loan(time.monotonic() + seconds) as lease:
            pending: tuple[Flight, int, list[Span]] | None = None
            for number, (remote, local) in enumerate(_cut(moves)):
                half = number % 2
                handle = lease.begin(self._agent.read, half, remote)
                if pending:
                    lease.land(target, *pending)
                pending = (handle, half, local)
            if pending:
                lease.land(target, *pending)

    @contextmanager
    def _loan(self, deadline: float) -> Iterator["_Loan"]:
        """Provide a buffer for one transfer; a link whose transfer fails is closed."""
        try:
            buffer = self._arrivals.lend(self.name, deadline)
            lease = _Loan(self, buffer, deadline)
            try:
                yield lease
            finally:
                self._arrivals.give_back(buffer, lease.flights, self.name)
        except (LinkError, ValueError, IndexError, RuntimeError) as error:
            self.close()
            raise LinkError(f"over NIXL: {error}") from error


class _Loan:
    """A buffer and the pending transfers of its two halves."""

    def __init__(self, link: Nixl, buffer: Buffer, deadline: float) -> None:
        self._link = link
        self._buffer = buffer
        self._deadline = deadline
        self.flights: list[Flight] = []
        """Transfers that may not have completed."""

    def begin(self, post: Begin, half: int, remote: Sequence[Span]) -> Flight:
        """Start a transfer between remote ranges and one half."""
        local_descriptors = [self._buffer.spot(range_) for range_ in _places(remote, half)]
        handle = post(
            self._link.name, local_descriptors, [self._link.spot(span) for span in remote]
        )
        self.flights.append(handle)
        return handle

    def wait(self, handle: Flight) -> None:
        """Wait until a transfer has completed. Raises LinkError."""
        while (state := handle.look()) is State.UNDER_WAY:
            if self._link.is_closed:
                raise LinkError("the link was closed")
            if time.monotonic() > self._deadline:
                raise LinkError("the transfer did not complete in time")
            time.sleep(_POLL_S)
        if state is State.FAILED:
            raise LinkError("the peer cannot be reached any more")
        self.flights.remove(handle)

    def land(self, target: Memory, handle: Flight, half: int, local: Sequence[Span]) -> None:
        """Wait for a chunk and copy it to its destination."""
        self.wait(handle)
        target.fill(self._buffer.memory, zip(local, _places(local, half), strict=True))
        # Must end before this half is filled again and before the engine reads the KV.
        _settle(target)

    def pack(self, source: Memory, local: Sequence[Span]) -> None:
        """Fill the first half with local ranges."""
        self._buffer.memory.fill(source, zip(_places(local, 0), local, strict=True))
        _settle(source)


def _places(ranges: Sequence[Span], half: int) -> list[Span]:
    return packed(ranges, half * PIECE_BYTES)


def _cut(moves: Iterable[Move]) -> Iterator[tuple[list[Span], list[Span]]]:
    """Yield chunks as (remote ranges, local ranges)."""
    remote, local = itertools.tee(moves)
    return zip(
        pieces((move.remote for move in remote), PIECE_BYTES),
        pieces((move.local for move in local), PIECE_BYTES),
        strict=True,
    )


def _settle(memory: Memory) -> None:
    """Wait for the copies of this thread, which are asynchronous on a GPU."""
    device = memory.regions[0].device
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
