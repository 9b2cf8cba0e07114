"""Follows every agent and feeds the directory. Started by the gateway and the router service.

One gRPC stream per agent; the list of agents is read anew twice a second. What is hard: telling a
gone agent from a silent one. A broken stream closes its instance at once and is dialled again with
back-off; an open but silent one puts it in doubt first and closes it later, for a busy machine
starves agents whose engines are fine; an address is forgotten only when the source no longer names
it and its stream has ended, so that a failing name server empties nothing.
"""

import asyncio
import contextlib
import logging
import random
import uuid
from collections.abc import Callable

import grpc

from cleave.policy.books import INTERVAL_MS, MAX_INTERVAL_MS
from cleave.router.directory import Directory
from cleave.router.rounds import Rounds
from cleave.rpc.channel import dial
from cleave.rpc.discovery import Agents, DiscoveryError
from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc

log = logging.getLogger(__name__)

POLL_S = 0.5
DISCOVERY_TIMEOUT_S = 5.0
MEETING_S = 3.0
"""For the agents that are there at the beginning, to say who they are."""
FIRST_DELAY_S = 0.05
LAST_DELAY_S = 2.0

_CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 5_000),
    # With the above as long as a silent agent keeps its instance open: a starved one is not gone.
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A channel of its own: a subchannel shared with an earlier one would share its back-off.
    ("grpc.use_local_subchannel_pool", 1),
)


class Fleet:
    """The streams to all agents."""

    def __init__(
        self,
        source: str,
        directory: Directory,
        clock: Callable[[], float],
        name: str = "",
        processes: int = 1,
    ) -> None:
        """`name`: of all `processes` that keep books together; else it is one of its own."""
        self._agents = Agents(source)
        self._directory = directory
        self._clock = clock
        # Agents tell routers how many they are and count them by name.
        self._name = name or uuid.uuid4().hex
        # They share what is reported, so that together they ask for no more than one would.
        self._interval_ms = min(processes * INTERVAL_MS, MAX_INTERVAL_MS)
        self._wanted: frozenset[str] = frozenset()
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._poller: asyncio.Task[None] | None = None
        self._unmet: set[str] = set()
        self._met = asyncio.Event()

    async def start(self) -> None:
        """Begin to follow; back when every agent there is has spoken or cannot be reached.

        Whoever knows a part of the fleet would deny the models of the rest, so not knowing it is
        waited for, but not long. Raises DiscoveryError when the source cannot be understood.
        """
        await self._look()
        self._poller = asyncio.create_task(self._poll())
        if self._unmet:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(MEETING_S):
                    await self._met.wait()

    async def stop(self) -> None:
        """End every stream."""
        tasks = [*self._streams.values(), *([self._poller] if self._poller else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._agents.close()

    async def _poll(self) -> None:
        rounds = Rounds(POLL_S)
        while True:
            await rounds.wait()
            if rounds.is_fair:
                self._directory.note_silence(self._clock())
            try:
                await self._look()
            except (DiscoveryError, OSError, TimeoutError) as error:
                log.warning("agents cannot be looked up: %s", error)
            rounds.begin()

    async def _look(self) -> None:
        # Not wait_for: before Python 3.12 it may lose a cancellation, and stop() would never end.
        async with asyncio.timeout(DISCOVERY_TIMEOUT_S):
            self._wanted = await self._agents.find()
        for address in self._wanted - self._streams.keys():
            self._unmet.add(address)
            self._streams[address] = asyncio.create_task(self._follow(address))

    async def _follow(self, address: str) -> None:
        delay = FIRST_DELAY_S
        try:
            async with dial(address, _CHANNEL_OPTIONS) as channel:
                while address in self._wanted:
                    try:
                        if await self._read(address, channel):
                            delay = FIRST_DELAY_S
                    except ValueError:
                        # Of a newer version, say. The rest of the fleet is followed all the same.
                        log.exception("agent %s says what is not understood", address)
                    self._meet(address)
                    self._directory.lose(address)
                    await asyncio.sleep(delay * random.uniform(0.5, 1.0))
                    delay = min(2 * delay, LAST_DELAY_S)
        finally:
            self._meet(address)
            self._directory.forget(address)
            self._streams.pop(address, None)

    async def _read(self, address: str, channel: grpc.aio.Channel) -> bool:
        """Read one stream to its end; whether anything came."""
        heard = False
        agent = agent_pb2_grpc.AgentStub(channel)
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for event in agent.Watch(
                agent_pb2.WatchRequest(router=self._name, interval_ms=self._interval_ms)
            ):
                self._directory.hear(address, event, self._clock())
                if not heard:
                    heard = True
                    self._meet(address)
        return heard

    def _meet(self, address: str) -> None:
        self._unmet.discard(address)
        if not self._unmet:
            self._met.set()
