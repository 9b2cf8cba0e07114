"""Other workers that a KV test could run with.

Used by proof.py. What is hard: with 64 workers starting at once, asking everybody would be 4,000
calls, so agents are asked a few at a time in random order until one suits.
"""

import asyncio
import random
from collections.abc import Iterable
from dataclasses import dataclass

import grpc

from cleave.rpc.discovery import find_agents
from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc

_ASKED_AT_ONCE = 4
_CALL_SECONDS = 2.0
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


def suits(own: agent_pb2.Registration, other: agent_pb2.Registration) -> bool:
    """Whether hand-offs between the two can occur: same deployment and revision, matching roles."""
    return (
        other.instance != own.instance
        and other.deployment == own.deployment
        and other.revision == own.revision
        and other.model == own.model
        and other.role in _COUNTERPARTS[own.role]
    )


async def look(source: str, own: agent_pb2.Registration, own_address: str) -> Sight:
    """Find a peer of `own` among the agents that `source` names. Raises DiscoveryError."""
    addresses = list(await find_agents(source) - {own_address})
    random.shuffle(addresses)
    starting = False
    for some in _batches(addresses, _ASKED_AT_ONCE):
        found = await asyncio.gather(*(ask(address) for address in some))
        suiting = [other for other in found if other and suits(own, other)]
        for other in suiting:
            if other.state in _ANSWERING:
                return Sight(peer=other)
        starting |= any(other.state == agent_pb2.STATE_STARTING for other in suiting)
    return Sight(starting=starting)


async def ask(address: str) -> agent_pb2.Registration | None:
    """What the agent at `address` says about itself; None when it does not answer."""
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            answer = await agent_pb2_grpc.AgentStub(channel).Health(
                agent_pb2.HealthRequest(), timeout=_CALL_SECONDS
            )
        except grpc.aio.AioRpcError:
            return None
    return answer.registration


def _batches(items: list[str], size: int) -> Iterable[list[str]]:
    return (items[at : at + size] for at in range(0, len(items), size))
