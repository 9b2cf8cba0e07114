"""An agent that sends events without pause, in a process of its own, so that its CPU time is not
counted. Run as `python -m tests.support.flooding_agent KIND`; prints its port."""

import asyncio
import itertools
import sys
from collections.abc import Iterator

import grpc

from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc

REGISTRATION = agent_pb2.Registration(
    instance="flood", deployment="d", model="m", revision="r", boot_id="flood-boot", epoch=1,
    role=agent_pb2.ROLE_DECODE, state=agent_pb2.STATE_READY, kv_block_size=16,
    kv_blocks_total=1_000, kv_path=agent_pb2.KvPath(verified=True),
)  # fmt: skip


def iter_events(kind: str, port: int) -> Iterator[agent_pb2.WatchEvent]:
    """`load`: reports; others: registrations, of which this changes."""
    registration = REGISTRATION
    registration.engine_url = f"http://127.0.0.1:{port}"
    yield agent_pb2.WatchEvent(registration=registration)
    for number in itertools.count():
        if kind == "load":
            load = agent_pb2.LoadReport(boot_id="flood-boot", pending_prompt_tokens=number % 999)
            yield agent_pb2.WatchEvent(load=load)
        else:
            if kind == "adapters":
                registration.adapters[:] = [f"a{number}-{n}" for n in range(1_000)]
            elif kind == "boot":
                registration.boot_id = f"boot-{number}"
            yield agent_pb2.WatchEvent(registration=registration)


class FloodingAgent(agent_pb2_grpc.AgentServicer):
    """Sends as fast as its caller reads."""

    def __init__(self, kind: str) -> None:
        self.kind, self.port = kind, 0

    async def Watch(self, request, context):  # noqa: N802
        for event in iter_events(self.kind, self.port):
            yield event


async def main(kind: str) -> None:
    """Serve until the process ends."""
    server, agent = grpc.aio.server(), FloodingAgent(kind)
    agent_pb2_grpc.add_AgentServicer_to_server(agent, server)
    agent.port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(agent.port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
