"""Other workers that a KV test could run with.

Used by proof.py. What is hard: with 64 workers starting at once, asking everybody would be 4,000
calls, so agents are asked a few at a time in random order until one suits; and the API server,
where it is what knows the addresses, is asked every few seconds only.
"""

import asyncio
import math
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import grpc

from cleave.rpc.channel import dial
from cleave.rpc.discovery import find_agents
from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc

_ASKED_AT_ONCE = 4
_CALL_SECONDS = 2.0
_LIST_SECONDS = 3.0
"""Between two lists of addresses from an API server."""
_ANSWERING = (agent_pb2.STATE_VERIFYING, agent_pb2.STATE_READY)
_COUNTERPARTS = {
    agent_pb2.ROLE_PREFILL: {agent_pb2.ROLE_DECODE, agent_pb2.ROLE_MIXED},
    agent_pb2.ROLE_DECODE: {agent_pb2.ROLE_PREFILL, agent_pb2.ROLE_MIXED},
    agent_pb2.ROLE_MIXED: {
        agent_pb2.ROLE_PREFILL,
        agent_pb2.ROLE_DECODE,
        agent_pb2.ROLE_MIXED,
    },
}


@dataclass(frozen=True, slots=True)
class Sight:
    """What a look around showed."""

    peer: agent_pb2.Registration | None = None
    """One whose engine answers."""
    starting: bool = False
    """A suitable one whose engine will answer soon."""


Matches = Callable[[agent_pb2.Registration, agent_pb2.Registration], bool]


def is_akin(own: agent_pb2.Registration, other: agent_pb2.Registration) -> bool:
    """Whether the engines of the two can hand over to each other: same deployment and revision."""
    return (
        other.instance != own.instance
        and other.deployment == own.deployment
        and other.revision == own.revision
        and other.model == own.model
    )


def suits(own: agent_pb2.Registration, other: agent_pb2.Registration) -> bool:
    """Whether hand-offs between the two can occur: akin, with matching roles."""
    return is_akin(own, other) and other.role in _COUNTERPARTS[own.role]


class Addresses:
    """The addresses that a source names, without one's own."""

    def __init__(self, source: str, own: str) -> None:
        self._source = source
        self._own = own
        self._interval_s = _LIST_SECONDS if source.startswith("endpoints:") else 0.0
        self._listed_at = -math.inf
        self._known: frozenset[str] = frozenset()

    async def find(self) -> frozenset[str]:
        """What is known, not older than a few seconds. Raises DiscoveryError, OSError."""
        now = asyncio.get_running_loop().time()
        if now - self._listed_at >= self._interval_s:
            # Counted from the attempt: a server that is away is not asked more often.
            self._listed_at = now
            self._known = await find_agents(self._source) - {self._own}
        return self._known


async def look(
    addresses: Collection[str], own: agent_pb2.Registration, matches: Matches = suits
) -> Sight:
    """Find a peer of `own` among the agents at these addresses."""
    shuffled = random.sample(tuple(addresses), len(addresses))
    starting = False
    for some in _batches(shuffled, _ASKED_AT_ONCE):
        found = await asyncio.gather(*(ask(address) for address in some))
        suiting = [other for other in found if other and matches(own, other)]
        for other in suiting:
            if other.state in _ANSWERING:
                return Sight(peer=other)
        starting |= any(other.state == agent_pb2.STATE_STARTING for other in suiting)
    return Sight(starting=starting)


async def ask(address: str) -> agent_pb2.Registration | None:
    """What the agent at `address` says about itself; None when it does not answer."""
    async with dial(address) as channel:
        try:
            answer = await agent_pb2_grpc.AgentStub(channel).Health(
                agent_pb2.HealthRequest(), timeout=_CALL_SECONDS
            )
        except grpc.aio.AioRpcError:
            return None
    return answer.registration


def _batches(items: list[str], size: int) -> Iterable[list[str]]:
    return (items[at : at + size] for at in range(0, len(items), size))
