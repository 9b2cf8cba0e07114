"""Records results of pairs: in this process at once, and at the decode side's agent for all others.

Used by the witness. What is hard: an agent may take seconds to answer, while
the next result of a pair is there, and the older one must not arrive last. So each agent has one
sender.
"""

import asyncio
import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

import grpc

from cleave.gateway.context import GatewayContext
from cleave.router.instance import RoutedInstance
from cleave.router.pair_proofs import PairResult
from cleave.rpc.agent_discovery import AgentDiscovery
from cleave.rpc.channel import dial
from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc

log = logging.getLogger(__name__)

_RECORD_S = 2.0
"""Timeout of the call to an agent."""
_MAX_REASON_CHARACTERS = 240
_MAX_PROOFS = 256
"""In one call."""

PairKey = tuple[str, str]
"""Boots of the prefill and of the decode engine."""

SendProofs = Callable[[str, agent_pb2.PairProofs], Awaitable[None]]
"""(address of an agent, proofs); raises AioRpcError."""


class PairRecorder:
    """One call at a time to each agent, in the background, with the newest result of each pair.
    Calls that fail are not repeated."""

    def __init__(self, context: GatewayContext, send: SendProofs) -> None:
        self._context = context
        self._send = send
        self._source = secrets.token_hex(8)
        self._numbers = itertools.count(1)
        self._unsent: dict[str, dict[PairKey, PairResult]] = {}
        """By agent."""
        self._senders: dict[str, asyncio.Task[None]] = {}
        """By agent."""

    def record(self, decode: RoutedInstance, boots: PairKey, result: PairResult) -> None:
        """Record a result of the pair with these boots of prefill and decode engine."""
        context, agent = self._context, decode.agent
        result = replace(result, source=self._source, sequence=next(self._numbers))
        context.router.registry.record_pair(decode, boots[0], result, context.clock())
        self._unsent.setdefault(agent, {})[boots] = result
        if agent not in self._senders:
            self._senders[agent] = asyncio.create_task(self._send_all(agent))

    def stop(self) -> None:
        """Cancel the calls that run."""
        for sender in self._senders.values():
            sender.cancel()

    async def _send_all(self, agent: str) -> None:
        try:
            while unsent := self._unsent.pop(agent, None):
                for decode_boot_id in dict.fromkeys(boot_id for _, boot_id in unsent):
                    results = [(k, each) for k, each in unsent.items() if k[1] == decode_boot_id]
                    for start in range(0, len(results), _MAX_PROOFS):
                        some = results[start : start + _MAX_PROOFS]
                        await self._call(agent, decode_boot_id, some)
        finally:
            del self._senders[agent]

    async def _call(
        self, agent: str, decode_boot_id: str, results: Iterable[tuple[PairKey, PairResult]]
    ) -> None:
        proofs, now = agent_pb2.PairProofs(boot_id=decode_boot_id), self._context.clock()
        for (boot_id, _), result in results:
            proofs.proofs.add(
                prefill=result.prefill,
                prefill_boot_id=boot_id,
                trust=agent_pb2.Trust.ValueType(result.trust),
                age_ms=max(int((now - result.at) * 1000), 0),
                bytes_per_s=result.bytes_per_s,
                pull_ms=result.pull_ms,
                reason=result.reason[:_MAX_REASON_CHARACTERS],
                source=result.source,
                sequence=result.sequence,
            )
        try:
            await self._send(agent, proofs)
        except grpc.aio.AioRpcError as error:
            # The result counts here all the same, and the next one is sent again.
            log.info("agent %s does not take the result of a pair: %s", agent, error.details())


async def send_proofs(agents: AgentDiscovery, agent: str, proofs: agent_pb2.PairProofs) -> None:
    """Send results to the decode side's agent. Raises AioRpcError."""
    metadata = await agents.build_metadata(agent)
    async with dial(agent) as channel:
        await agent_pb2_grpc.AgentStub(channel).RecordPairs(
            proofs, timeout=_RECORD_S, metadata=metadata
        )
