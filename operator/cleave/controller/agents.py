"""Orders to agents: the operator's only words to instances. Called by the executor.

What is hard: the gateways' pool manager gives orders too, and the epoch lets only the newer one
through. So the agent is asked for its epoch first, and once more when somebody was faster.
"""

import grpc

from cleave.api.role import Role
from cleave.rpc import epochs
from cleave.rpc.channel import dial
from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc

TIMEOUT_S = 2.0
ORDER_TIMEOUT_S = 20.0
"""The agent proves by a hand-off that the role works before it takes it."""
_TRIES = 2


class AgentError(RuntimeError):
    """The agent does not answer, or does not take the order; one line."""


async def set_home(agent: str, role: Role) -> None:
    """Give the instance this role for good; nothing where it has it. Raises AgentError."""
    wanted = agent_pb2.Role.Value(f"ROLE_{role.upper()}")
    async with dial(agent) as channel:
        stub = agent_pb2_grpc.AgentStub(channel)
        try:
            for left in reversed(range(_TRIES)):
                health = await stub.Health(agent_pb2.HealthRequest(), timeout=TIMEOUT_S)
                stated = health.registration
                if stated.home == wanted:
                    return
                if stated.epoch >= epochs.LAST:
                    raise AgentError(
                        f"agent {agent}: epoch exhausted ({stated.epoch});"
                        " delete the pod to give it another role"
                    )
                order = agent_pb2.SetRoleRequest(
                    role=wanted, epoch=stated.epoch + 1, boot_id=stated.boot_id, lasting=True
                )
                try:
                    await stub.SetRole(order, timeout=ORDER_TIMEOUT_S)
                except grpc.aio.AioRpcError as error:
                    if left == 0 or not _is_outrun(error):
                        raise
                else:
                    return
        except grpc.aio.AioRpcError as error:
            raise AgentError(f"agent {agent}: {error.details() or error.code().name}") from error


def _is_outrun(error: grpc.aio.AioRpcError) -> bool:
    """Whether another order, or another life of the engine, came in between."""
    return error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ABORTED)
