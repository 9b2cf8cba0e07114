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
from cleave.rpc.credentials import AgentEndpoint, Credentials
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


class PeerEndpoints:
    """The agents of a source, without this one."""

    def __init__(self, source: str, own: str) -> None:
        self._source = source
        self._own = own
        self._interval_s = _LIST_SECONDS if source.startswith("endpoints:") else 0.0
        self._listed_at = -math.inf
        self._endpoints: frozenset[AgentEndpoint] = frozenset()

    async def get_endpoints(self) -> frozenset[AgentEndpoint]:
        """Return the agents, at most a few seconds old. Raises DiscoveryError, OSError."""
        now = asyncio.get_running_loop().time()
        if now - self._listed_at >= self._interval_s:
            # Counted from the attempt, so that a failing server is not polled more often.
            self._listed_at = now
            listed = await list_agents(self._source)
            self._endpoints = frozenset(each for each in listed if each.address != self._own)
        return self._endpoints


async def find_peer(
    endpoints: Collection[AgentEndpoint],
    own: agent_pb2.Registration,
    credentials: Credentials,
    matches: PeerFilter = is_counterpart,
) -> PeerScan:
    """Search for a peer of `own` among these agents."""
    shuffled = random.sample(tuple(endpoints), len(endpoints))
    starting = False
    for at in range(0, len(shuffled), _BATCH_SIZE):
        batch = shuffled[at : at + _BATCH_SIZE]
        calls = (fetch_registration(each, credentials) for each in batch)
        registrations = await asyncio.gather(*calls)
        matching = [each for each in registrations if each and matches(own, each)]
        for peer in matching:
            if peer.state in _SERVING_STATES:
                return PeerScan(peer)
        starting |= any(peer.state == agent_pb2.STATE_STARTING for peer in matching)
    return PeerScan(has_starting=starting)


async def fetch_registration(
    agent: AgentEndpoint, credentials: Credentials
) -> agent_pb2.Registration | None:
    """Return the registration of an agent; None when it does not respond, or reports something that
    is not its own."""
    metadata = await credentials.build_metadata(agent)
    async with dial(agent.address) as channel:
        try:
            stub = agent_pb2_grpc.AgentStub(channel)
            request = agent_pb2.HealthRequest()
            answer = await stub.Health(request, timeout=_CALL_SECONDS, metadata=metadata)
            check_registration(answer.registration, agent.address, pod=agent.pod)
        except (grpc.aio.AioRpcError, ValueError):
            return None
    return answer.registration
