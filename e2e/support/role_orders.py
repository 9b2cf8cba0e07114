"""Roles that agents are ordered to take, as gateways order them."""

import grpc

from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc

from e2e.support.deployments import Deployment

ORDER_TIMEOUT_S = 120


class Flipper:
    """Orders that agents get, each newer than the last one."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._channels: dict[str, grpc.Channel] = {}
        self._addresses: dict[str, str] = {}
        (file,) = deployment.state_dir.rglob("agents")
        for address in file.read_text().split():
            channel = grpc.insecure_channel(address)
            health = agent_pb2_grpc.AgentStub(channel).Health(
                agent_pb2.HealthRequest(), timeout=20, metadata=deployment.sign(address)
            )
            self._channels[health.registration.instance] = channel
            self._addresses[health.registration.instance] = address
            self.newest = health.registration.epoch

    def flip(self, instance: str, role: "agent_pb2.Role.ValueType") -> agent_pb2.Registration:
        """Order it; what the instance says then."""
        agent = agent_pb2_grpc.AgentStub(self._channels[instance])
        token = self._deployment.sign(self._addresses[instance])
        before = agent.Health(agent_pb2.HealthRequest(), timeout=20, metadata=token).registration
        order = agent_pb2.SetRoleRequest(role=role, epoch=before.epoch + 1, boot_id=before.boot_id)
        agent.SetRole(order, timeout=ORDER_TIMEOUT_S, metadata=token)
        after = agent.Health(agent_pb2.HealthRequest(), timeout=20, metadata=token).registration
        assert (after.role, after.boot_id, after.restarts) == (
            role,
            before.boot_id,
            before.restarts,
        )
        return after

    def load(self, instance: str) -> agent_pb2.LoadReport:
        agent = agent_pb2_grpc.AgentStub(self._channels[instance])
        token = self._deployment.sign(self._addresses[instance])
        return agent.Health(agent_pb2.HealthRequest(), timeout=20, metadata=token).load

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()
