"""Orders of earlier and later gateways and operators: carried out, or refused with a status."""

import asyncio
import contextlib

import grpc
from hypothesis import HealthCheck, given, settings

from cleave.rpc.v1 import agent_pb2
from cleave_worker.agent.config import AgentConfig
from cleave_worker.agent.drain import DrainResult
from cleave_worker.agent.instance import WorkerInstance
from cleave_worker.agent.service import AgentService
from cleave_worker.scheduling.config import ROLES

from tests.support.later_messages import messages

REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ABORTED,
}


class Aborted(Exception):  # noqa: N818 - not an error of ours
    """A call was refused with a status."""


class Context:
    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        assert code in REFUSALS
        raise Aborted(details)


async def drain(_seconds: float | None) -> DrainResult:
    return DrainResult(is_empty=True, num_remaining=0)


async def verify(_role: int) -> None:
    return None


@given(
    messages(agent_pb2.SetRoleRequest),
    messages(agent_pb2.WatchRequest),
    messages(agent_pb2.DrainRequest),
    messages(agent_pb2.HealthRequest),
)
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_an_agent_takes_orders_of_any_version(
    config: AgentConfig, set_role, watch, drain_request, health
) -> None:
    asyncio.run(give_orders(config, set_role, watch, drain_request, health))


async def give_orders(config: AgentConfig, set_role, watch, drain_request, health) -> None:
    instance = WorkerInstance(config)
    service = AgentService(instance, drain, verify)
    with contextlib.suppress(Aborted):
        response = await service.SetRole(set_role, Context())
        assert response.role == set_role.role
    assert instance.copy_registration().role in ROLES.values()
    with contextlib.suppress(Aborted):
        event = await anext(aiter(service.Watch(watch, Context())))
        assert event.HasField("registration")
    assert (await service.Drain(drain_request, Context())).empty
    answer = await service.Health(health, Context())
    assert answer.registration.instance == config.name
