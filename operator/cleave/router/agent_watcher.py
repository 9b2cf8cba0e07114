"""Watches every agent and updates the registry. Started by the gateway.

One gRPC stream per agent, which is read no faster than `rpc.event_budget` allows; the list of
agents is refreshed twice a second. What is hard: to
distinguish a lost agent from a silent one. A broken stream closes its instance at once and is
reconnected with back-off. A silent open stream makes the instance stale first and closes it later,
because a busy machine starves agents whose engines work. An address is removed only when the source
no longer lists it and its stream has ended, so that a failing name server removes nothing.
"""

import asyncio
import contextlib
import logging
import random
import time
import uuid
from collections.abc import Callable

import grpc

from cleave.policy.queue_model import INTERVAL_MS, MAX_INTERVAL_MS
from cleave.router.registry import InstanceRegistry
from cleave.router.watchdog import WatchdogTimer
from cleave.rpc.agent_discovery import AgentDiscovery, DiscoveryError
from cleave.rpc.channel import dial
from cleave.rpc.event_budget import EventBudget
from cleave.rpc.plan_thresholds import PlanThresholds
from cleave.rpc.registration_checks import (
    MAX_REGISTRATION_BYTES,
    check_pairs,
    check_registration,
)
from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc

log = logging.getLogger(__name__)

POLL_S = 0.5
DISCOVERY_TIMEOUT_S = 5.0
REGISTRATION_TIMEOUT_S = 3.0
"""How long `start` waits for the registrations of the agents that exist at the beginning."""
MIN_DELAY_S = 0.05
MAX_DELAY_S = 2.0

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 2 * MAX_REGISTRATION_BYTES),
    # A stream that is not read is not read ahead for more than 64 KiB: by default it grows to MiB.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.keepalive_time_ms", 5_000),
    # Together as long as SILENCE_S, until which a silent agent's instance stays open.
    ("grpc.keepalive_timeout_ms", 5_000),
    # gRPC 1.85 waits a minute where only the first of both is set.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Not shared: a subchannel of an earlier channel would have its back-off.
    ("grpc.use_local_subchannel_pool", 1),
)


class AgentWatcher:
    """Keeps one stream open to each agent."""

    def __init__(
        self,
        agents: AgentDiscovery,
        registry: InstanceRegistry,
        clock: Callable[[], float],
        name: str = "",
        processes: int = 1,
        *,
        deployment: str = "",
        on_thresholds: Callable[[PlanThresholds], None] | None = None,
    ) -> None:
        """`name`: common name of all `processes` that share load accounting; empty: a new one.
        `deployment`: whose agents are accepted; empty: of any. `on_thresholds`: called with the
        plan's thresholds whenever the source has others; None: they have no effect."""
        self._agents = agents
        self._registry = registry
        self._clock = clock
        self._deployment = deployment
        self._on_thresholds = on_thresholds
        self._thresholds = PlanThresholds()
        # Agents count routers by name and report their number to each of them.
        self._name = name or uuid.uuid4().hex
        # The processes share reports, so that together they request as many as a single one.
        self._interval_ms = min(processes * INTERVAL_MS, MAX_INTERVAL_MS)
        self._addresses: frozenset[str] = frozenset()
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._poller: asyncio.Task[None] | None = None
        self._unregistered: set[str] = set()
        self._all_registered = asyncio.Event()

    async def start(self) -> None:
        """Start watching; returns when every agent has registered or failed, or after
        REGISTRATION_TIMEOUT_S.

        A router that knows only a part of the fleet would reject models of the other part.
        Raises DiscoveryError when the source is malformed.
        """
        await self._discover()
        if not self._addresses:
            log.info(
                "no agents in %r yet: requests get 503 until it lists some", self._agents.source
            )
        self._poller = asyncio.create_task(self._poll())
        if self._unregistered:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REGISTRATION_TIMEOUT_S):
                    await self._all_registered.wait()

    async def stop(self) -> None:
        """End every stream."""
        tasks = [*self._streams.values(), *([self._poller] if self._poller else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._agents.close()

    async def _poll(self) -> None:
        timer = WatchdogTimer(POLL_S)
        while True:
            await timer.wait()
            if timer.is_reliable:
                self._registry.update_connectivity(self._clock())
            try:
                await self._discover()
                await self._agents.renew_credentials()
            except (DiscoveryError, OSError, TimeoutError) as error:
                log.warning("agent discovery failed: %s", error)
            timer.restart()

    async def _discover(self) -> None:
        # Not wait_for: before Python 3.12 it may lose a cancellation, and stop() would never end.
        async with asyncio.timeout(DISCOVERY_TIMEOUT_S):
            self._addresses = self._registry.listed = await self._agents.list_addresses()
        if self._agents.thresholds != self._thresholds:
            self._thresholds = self._agents.thresholds
            if self._on_thresholds is not None:
                self._on_thresholds(self._thresholds)
        for address in self._addresses - self._streams.keys():
            self._unregistered.add(address)
            self._streams[address] = asyncio.create_task(self._watch(address))

    async def _watch(self, address: str) -> None:
        delay, budget = MIN_DELAY_S, EventBudget(self._clock)
        try:
            async with dial(address, _CHANNEL_OPTIONS) as channel:
                while address in self._addresses:
                    began_s = self._clock()
                    try:
                        await self._read_stream(address, channel, budget)
                    except (ValueError, ArithmeticError) as error:
                        # The agent may be of a newer version; other agents are not affected.
                        log.warning("agent %s sent an invalid event: %s", address, error)
                    self._mark_registered(address)
                    self._registry.on_disconnect(address)
                    if self._clock() - began_s > MAX_DELAY_S:
                        delay = MIN_DELAY_S
                    await asyncio.sleep(delay * random.uniform(0.5, 1.0))
                    delay = min(2 * delay, MAX_DELAY_S)
        finally:
            self._mark_registered(address)
            self._registry.remove_agent(address)
            self._streams.pop(address, None)
            self._registry.refusals.pop(address, None)

    async def _read_stream(
        self, address: str, channel: grpc.aio.Channel, budget: EventBudget
    ) -> None:
        """Read one stream to its end. Raises ValueError, ArithmeticError for an invalid event."""
        has_event = False
        request = agent_pb2.WatchRequest(router=self._name, interval_ms=self._interval_ms)
        try:
            metadata = await self._agents.build_metadata(address)
            async for event in agent_pb2_grpc.AgentStub(channel).Watch(request, metadata=metadata):
                began_s = time.thread_time()
                self._apply(address, event)
                if not has_event:
                    has_event = True
                    self._registry.refusals.pop(address, None)
                    self._mark_registered(address)
                pause_s = budget.count(time.thread_time() - began_s, event.ByteSize())
                if pause_s:
                    # Flow control keeps the agent from sending more.
                    await asyncio.sleep(pause_s)
        except grpc.aio.AioRpcError as error:
            refusal = str(error.details())
            is_refused = error.code() is grpc.StatusCode.UNAUTHENTICATED
            # Logged once, not at each attempt.
            if is_refused and self._registry.refusals.get(address) != refusal:
                log.warning("agent %s refuses this gateway: %s", address, refusal)
                self._registry.refusals[address] = refusal

    def _apply(self, address: str, event: agent_pb2.WatchEvent) -> None:
        if event.HasField("registration"):
            pod = self._agents.find_agent(address).pod
            check_registration(event.registration, address, self._deployment, pod)
        elif event.HasField("pairs"):
            check_pairs(event.pairs)
        self._registry.on_event(address, event, self._clock())

    def _mark_registered(self, address: str) -> None:
        self._unregistered.discard(address)
        if not self._unregistered:
            self._all_registered.set()
