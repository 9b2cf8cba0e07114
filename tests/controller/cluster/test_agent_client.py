"""Orders to agents, by way of a real connection."""

from collections.abc import AsyncIterator

import grpc
import pytest

from cleave.api.role import Role
from cleave.controller.cluster.agent_client import (
    AgentError,
    order_adapters,
    set_configured_role,
)
from cleave.policy.adapters import AdapterSource
from cleave.rpc.credentials import AgentEndpoint, Credentials
from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc


class Agent(agent_pb2_grpc.AgentServicer):
    """Takes newer orders; `outruns` times somebody else is faster."""

    def __init__(self, outruns: int = 0) -> None:
        self.registration = agent_pb2.Registration(
            role=agent_pb2.ROLE_MIXED, home=agent_pb2.ROLE_DECODE, epoch=4, boot_id="b"
        )
        self.outruns = outruns
        self.orders: list[agent_pb2.SetRoleRequest] = []

    async def Health(self, request, context):  # noqa: N802
        return agent_pb2.HealthResponse(registration=self.registration)

    async def SetRole(self, request, context):  # noqa: N802
        self.orders.append(request)
        if self.outruns:
            self.outruns -= 1
            self.registration.epoch += 1
        if request.epoch <= self.registration.epoch:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "epoch is not newer")
        return agent_pb2.SetRoleResponse()


class Served:
    """An agent that listens."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.server = grpc.aio.server()
        agent_pb2_grpc.add_AgentServicer_to_server(agent, self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.endpoint = AgentEndpoint(f"127.0.0.1:{port}")


@pytest.fixture
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    server = Served(Agent(getattr(request, "param", 0)))
    await server.server.start()
    yield server
    await server.server.stop(0)


async def test_the_order_is_lasting_and_newer_than_the_agents_own(served: Served) -> None:
    await set_configured_role(Credentials(), served.endpoint, Role.PREFILL)
    (order,) = served.agent.orders
    assert (order.role, order.epoch, order.lasting) == (agent_pb2.ROLE_PREFILL, 5, True)


async def test_an_agent_already_in_its_role_gets_no_call(served: Served) -> None:
    await set_configured_role(Credentials(), served.endpoint, Role.DECODE)
    assert not served.agent.orders


@pytest.mark.parametrize("served", [1], indirect=True)
async def test_an_order_that_was_outrun_is_given_once_more(served: Served) -> None:
    await set_configured_role(Credentials(), served.endpoint, Role.PREFILL)
    assert [order.epoch for order in served.agent.orders] == [5, 6]


@pytest.mark.parametrize("served", [9], indirect=True)
async def test_an_agent_that_keeps_refusing_is_left_alone(served: Served) -> None:
    with pytest.raises(AgentError, match="epoch is not newer"):
        await set_configured_role(Credentials(), served.endpoint, Role.PREFILL)
    assert len(served.agent.orders) == 2


async def test_an_agent_with_the_highest_epoch_gets_no_call(served: Served) -> None:
    served.agent.registration.epoch = 2**64 - 1
    with pytest.raises(AgentError, match=r"epoch exhausted .*; delete the pod"):
        await set_configured_role(Credentials(), served.endpoint, Role.PREFILL)
    assert not served.agent.orders


async def test_an_agent_that_is_not_there_is_an_error_of_one_line() -> None:
    with pytest.raises(AgentError, match=r"^agent 127\.0\.0\.1:1: .+"):
        await set_configured_role(Credentials(), AgentEndpoint("127.0.0.1:1"), Role.PREFILL)


class AdapterAgent(Agent):
    """Takes orders of adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter_orders: list[agent_pb2.SetAdaptersRequest] = []

    async def SetAdapters(self, request, context):  # noqa: N802
        self.adapter_orders.append(request)
        if not request.adapters:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "generation 1 is older than 2")
        return agent_pb2.SetAdaptersResponse()


async def test_adapters_are_ordered_with_their_generation() -> None:
    served = Served(AdapterAgent())
    await served.server.start()
    await order_adapters(Credentials(), served.endpoint, [AdapterSource("sql", "/data/sql")], 7)
    (order,) = served.agent.adapter_orders
    assert [(each.name, each.source) for each in order.adapters] == [("sql", "/data/sql")]
    assert order.generation == 7
    with pytest.raises(AgentError, match="generation 1 is older than 2"):
        await order_adapters(Credentials(), served.endpoint, [], 1)
    await served.server.stop(0)


async def test_an_agent_of_an_earlier_version_is_named_as_such(served: Served) -> None:
    with pytest.raises(AgentError, match="of an earlier version; delete its pod"):
        await order_adapters(Credentials(), served.endpoint, [], 1)
