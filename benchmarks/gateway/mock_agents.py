"""Stand-ins for the agents beside the load mocks, so that a real gateway follows them.

Started by processes.py as a process of its own. It sends what a healthy agent sends: a
Registration, then LoadReports at the rate for a router that alone sends requests: while one
gateway is measured the others stand still. Reports say "idle": the mocks have no queue.
"""

import argparse
import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc.aio

from cleave.policy.queue_model import INTERVAL_MS, choose_report_interval_ms
from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc

KV_BLOCKS = 1 << 20


@dataclass(frozen=True, slots=True)
class Instance:
    """One mock engine: what its agent has to state."""

    role: str
    boot_id: str
    engine: str
    listen: str


class FakeAgent(agent_pb2_grpc.AgentServicer):
    """Serves Watch and Health for one instance that never changes."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance

    async def Watch(  # noqa: N802  (gRPC's name)
        self, request: agent_pb2.WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[agent_pb2.WatchEvent]:
        yield agent_pb2.WatchEvent(registration=describe(self._instance))
        while True:
            yield agent_pb2.WatchEvent(load=report(self._instance))
            await asyncio.sleep(
                choose_report_interval_ms(request.interval_ms or INTERVAL_MS, 1) / 1000
            )

    async def Health(  # noqa: N802
        self, request: agent_pb2.HealthRequest, context: grpc.aio.ServicerContext
    ) -> agent_pb2.HealthResponse:
        return agent_pb2.HealthResponse(
            registration=describe(self._instance), load=report(self._instance)
        )


def describe(instance: Instance) -> agent_pb2.Registration:
    return agent_pb2.Registration(
        instance=instance.boot_id,
        deployment="bench",
        model="bench",
        revision="1",
        boot_id=instance.boot_id,
        role=agent_pb2.Role.Value(f"ROLE_{instance.role.upper()}"),
        epoch=1,
        state=agent_pb2.STATE_READY,
        engine_url=f"http://{instance.engine}",
        engine="load mock",
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        max_model_len=1 << 17,
        kv_block_size=16,
        kv_blocks_total=KV_BLOCKS,
        kv_path=agent_pb2.KvPath(verified=True, transport="load mock"),
    )


def report(instance: Instance) -> agent_pb2.LoadReport:
    return agent_pb2.LoadReport(
        boot_id=instance.boot_id,
        epoch=1,
        kv_blocks_free=KV_BLOCKS,
        sampled_ns=time.monotonic_ns(),
    )


async def serve(instances: list[Instance]) -> None:
    servers = []
    for instance in instances:
        server = grpc.aio.server()
        agent_pb2_grpc.add_AgentServicer_to_server(FakeAgent(instance), server)
        server.add_insecure_port(instance.listen)
        await server.start()
        servers.append(server)
    await asyncio.gather(*(server.wait_for_termination() for server in servers))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("instances", nargs="+", metavar="ROLE,BOOT_ID,ENGINE,LISTEN")
    values = parser.parse_args().instances
    asyncio.run(serve([Instance(*value.split(",")) for value in values]))


if __name__ == "__main__":
    main()
