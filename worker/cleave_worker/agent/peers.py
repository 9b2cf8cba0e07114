"""Finds other workers with which a KV test can run.

Used by `readiness`. With 64 workers starting at once, polling all would be 4,000 calls, so agents
are polled a few at a time in random order until one matches. If an API server knows the addresses,
it is polled only every few seconds.
"""

import asyncio
import math
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass

import grpc

from cleave.rpc.agent_discovery import list_agents
from cleave.rpc.channel import dial
from cleave.rpc.credentials import build_metadata
from cleave.rpc.registration_checks import check_registration
from cleave.rpc.revision import get_spec_revision
from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc

_BATCH_SIZE = 4
_CALL_SECONDS = 2.0
_LIST_SECONDS = 3.0
"""Interval between lists of addresses from an API server."""
_SERVING_STATES = (agent_pb2.STATE_VERIFYING, agent_pb2.STATE_READY)
_COUNTERPARTS = {
    agent_pb2.ROLE_PREFILL: {agent_pb2.ROLE_DECODE, agent_pb2.ROLE_MIXED},
    agent_pb2.ROLE_DECODE: {agent_pb2.ROLE_PREFILL, agent_pb2.ROLE_MIXED},
    agent_pb2.ROLE_MIXED: {agent_pb2.ROLE_PREFILL, agent_pb2.ROLE_DECODE, agent_pb2.ROLE_MIXED},
}


@dataclass(frozen=True, slots=True)
class PeerScan:
    """Result of a search for peers."""

    peer: agent_pb2.Registration | None = None
    """A matching peer whose engine responds; None: there is none."""
    has_starting: bool = False
    """Whether there is a matching peer whose engine is still starting."""


PeerFilter = Callable[[agent_pb2.Registration, agent_pb2.Registration], bool]


def is_compatible(own: agent_pb2.Registration, other: agent_pb2.Registration) -> bool:
    """Return whether two engines can transfer KV: same deployment, model and revision. What an
    engine loads that starts may not be known yet."""
    is_starting = other.state == agent_pb2.STATE_STARTING
    return (
        other.instance != own.instance
        and other.deployment == own.deployment
        and other.model == own.model
        and (
            get_spec_revision(other.revision) == get_spec_revision(own.revision)
            if is_starting
            else other.revision == own.revision
        )
    )


def is_counterpart(own: agent_pb2.Registration, other: agent_pb2.Registration) -> bool:
    """Return whether requests can be disaggregated over both: compatible, with matching roles."""
    return is_compatible(own, other) and other.role in _COUNTERPARTS[own.role]


class PeerAddresses:
    """The agent addresses from a source, without this agent's own."""

    def __init__(self, source: str, own: str) -> None:
        self._source = source
        self._own = own
        self._interval_s = _LIST_SECONDS if source.startswith("endpoints:") else 0.0
        self._listed_at = -math.inf
        self._addresses: frozenset[str] = frozenset()

    async def get_addresses(self) -> frozenset[str]:
        """Return the addresses, at most a few seconds old. Raises DiscoveryError, OSError."""
        now = asyncio.get_running_loop().time()
        if now - self._listed_at >= self._interval_s:
            # Counted from the attempt, so that a failing server is not polled more often.
            self._listed_at = now
            self._addresses = await list_agents(self._source) - {self._own}
        return self._addresses


async def find_peer(
    addresses: Collection[str], own: agent_pb2.Registration, matches: PeerFilter = is_counterpart
) -> PeerScan:
    """Search for a peer of `own` among the agents at these addresses."""
    shuffled = random.sample(tuple(addresses), len(addresses))
    starting = False
    for at in range(0, len(shuffled), _BATCH_SIZE):
        batch = shuffled[at : at + _BATCH_SIZE]
        registrations = await asyncio.gather(*map(fetch_registration, batch))
        matching = [each for each in registrations if each and matches(own, each)]
        for peer in matching:
            if peer.state in _SERVING_STATES:
                return PeerScan(peer)
        starting |= any(peer.state == agent_pb2.STATE_STARTING for peer in matching)
    return PeerScan(has_starting=starting)


async def fetch_registration(address: str) -> agent_pb2.Registration | None:
    """Return the registration of the agent at `address`; None when it does not respond."""
    async with dial(address) as channel:
        try:
            stub = agent_pb2_grpc.AgentStub(channel)
            answer = await stub.Health(
                agent_pb2.HealthRequest(sends_engine_key=True),
                timeout=_CALL_SECONDS,
                metadata=build_metadata(),
            )
            check_registration(answer.registration, address)
        except (grpc.aio.AioRpcError, ValueError):
            return None
    return answer.registration
