"""Records results of pairs: in this process at once, and at the decode side's agent for all others.

Used by the witness and the auditor.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import grpc

from cleave.gateway.context import GatewayContext
from cleave.router.instance import RoutedInstance
from cleave.router.pair_proofs import PairResult
from cleave.rpc.channel import dial
from cleave.rpc.credentials import build_metadata
from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc

log = logging.getLogger(__name__)

_RECORD_S = 2.0
"""Timeout of the call to an agent."""
_MAX_REASON_CHARACTERS = 240

SendProofs = Callable[[str, agent_pb2.PairProofs], Awaitable[None]]
"""(address of an agent, proofs); raises AioRpcError."""


class PairRecorder:
    """Calls to agents are made in the background; those that fail are not repeated."""

    def __init__(self, context: GatewayContext, send: SendProofs | None = None) -> None:
        self._context = context
        self._send = send or send_proofs
        self._calls: set[asyncio.Task[None]] = set()

    def record(self, decode: RoutedInstance, boots: tuple[str, str], result: PairResult) -> None:
        """Record a result of the pair with these boots of prefill and decode engine."""
        boot_id, decode_boot_id = boots
        self._context.router.registry.record_pair(decode, boot_id, result, self._context.clock())
        proofs = agent_pb2.PairProofs(boot_id=decode_boot_id)
        proofs.proofs.add(
            prefill=result.prefill,
            prefill_boot_id=boot_id,
            trust=agent_pb2.Trust.ValueType(result.trust),
            bytes_per_s=result.bytes_per_s,
            pull_ms=result.pull_ms,
            reason=result.reason[:_MAX_REASON_CHARACTERS],
        )
        call = asyncio.create_task(self._call(decode.agent, proofs))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    def stop(self) -> None:
        """Cancel the calls that run."""
        for call in self._calls:
            call.cancel()

    async def _call(self, agent: str, proofs: agent_pb2.PairProofs) -> None:
        try:
            await self._send(agent, proofs)
        except grpc.aio.AioRpcError as error:
            # The result counts here all the same, and the next one is sent again.
            log.info("agent %s does not take the result of a pair: %s", agent, error.details())


async def send_proofs(agent: str, proofs: agent_pb2.PairProofs) -> None:
    """Send results to the decode side's agent. Raises AioRpcError."""
    async with dial(agent) as channel:
        await agent_pb2_grpc.AgentStub(channel).RecordPairs(
            proofs, timeout=_RECORD_S, metadata=build_metadata()
        )
