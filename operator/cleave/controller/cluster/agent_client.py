"""Client of the agents' gRPC API: sets an instance's configured role, and orders its adapters.
Called by the executor.

The gateways' role flipper sets roles too, and an agent accepts only an epoch above its present one.
So the epoch is read first, and read again after a lost race.
"""

from collections.abc import Iterable

import grpc

from cleave.api.role import Role
from cleave.policy.adapters import AdapterSource
from cleave.rpc import role_epochs
from cleave.rpc.channel import dial
from cleave.rpc.credentials import AgentEndpoint, Credentials
from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc

TIMEOUT_S = 2.0
SET_ROLE_TIMEOUT_S = 20.0
"""Before a role change the agent runs a KV handoff as self-test, which takes seconds."""
_ATTEMPTS = 2


class AgentError(RuntimeError):
    """The agent does not respond or refuses the role; the message is one line."""


async def set_configured_role(credentials: Credentials, agent: AgentEndpoint, role: Role) -> None:
    """Set the instance's configured role, unless it has it already. Raises AgentError."""
    desired = agent_pb2.Role.Value(f"ROLE_{role.upper()}")
    async with dial(agent.address) as channel:
        stub = agent_pb2_grpc.AgentStub(channel)
        try:
            for remaining in reversed(range(_ATTEMPTS)):
                metadata = await credentials.build_metadata(agent)
                request = agent_pb2.HealthRequest()
                health = await stub.Health(request, timeout=TIMEOUT_S, metadata=metadata)
                registration = health.registration
                if registration.home == desired:
                    return
                if registration.epoch >= role_epochs.MAX_EPOCH:
                    raise AgentError(
                        f"agent {agent.address}: epoch exhausted ({registration.epoch});"
                        " delete the pod to give it another role"
                    )
                order = agent_pb2.SetRoleRequest(
                    role=desired,
                    epoch=registration.epoch + 1,
                    boot_id=registration.boot_id,
                    lasting=True,
                )
                try:
                    await stub.SetRole(order, timeout=SET_ROLE_TIMEOUT_S, metadata=metadata)
                except grpc.aio.AioRpcError as error:
                    if remaining == 0 or not _is_superseded(error):
                        raise
                else:
                    return
        except grpc.aio.AioRpcError as error:
            reason = error.details() or error.code().name
            raise AgentError(f"agent {agent.address}: {reason}") from error


async def order_adapters(
    credentials: Credentials,
    agent: AgentEndpoint,
    adapters: Iterable[AdapterSource],
    generation: int,
) -> None:
    """Order the LoRA adapters of an instance. Raises AgentError."""
    sources = [agent_pb2.AdapterSource(name=e.name, source=e.source) for e in adapters]
    request = agent_pb2.SetAdaptersRequest(adapters=sources, generation=generation)
    metadata = await credentials.build_metadata(agent)
    async with dial(agent.address) as channel:
        stub = agent_pb2_grpc.AgentStub(channel)
        try:
            await stub.SetAdapters(request, timeout=TIMEOUT_S, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            reason = error.details() or error.code().name
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                reason = "it is of an earlier version; delete its pod to replace it"
            raise AgentError(f"agent {agent.address}: {reason}") from error


def _is_superseded(error: grpc.aio.AioRpcError) -> bool:
    """Whether another role change or an engine restart came in between."""
    return error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ABORTED)
