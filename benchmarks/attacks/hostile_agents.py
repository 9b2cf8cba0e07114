"""Agents and one engine under an attacker's control: `python hostile_agents.py PORT COUNT [flood]`.

Agents listen at PORT and the ports after it, their engine before it. The engine serves the model
`wide`; what a prompt names is what it streams, from bytes that are made once, so that it takes
little of the machine. With `flood` the first agent sends its registration without a pause.
"""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator

import grpc

from cleave.rpc.boot_ids import create_boot_id
from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc

MODEL = "wide"
REPORT_S = 1.0
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def build_event(choice: dict[str, object]) -> bytes:
    event = {"id": "c", "object": "x", "created": 1, "model": MODEL, "choices": [choice]}
    data = b"data: %b\n\n" % json.dumps(event, separators=(",", ":")).encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


def build_logprobs(count: int) -> bytes:
    top = [
        {"token": f" tok{n}", "logprob": -12.345678901, "bytes": [32, 116, 111, 107, 50]}
        for n in range(20)
    ]
    token = {"token": " w", "logprob": -1.2345678, "bytes": [32, 119], "top_logprobs": top}
    choice = {"index": 0, "delta": {"content": " w" * count}, "finish_reason": None}
    return build_event(choice | {"logprobs": {"content": [token] * count}})


PLAIN = {"index": 0, "text": " word", "logprobs": None, "finish_reason": None}
SCRIPTS = {
    "logprobs": (build_logprobs(1) * 20, 50, 0.05),
    "interval": (build_logprobs(100), 50, 0.1),
    "long": (build_event(PLAIN) * 64, 2_048, 0.0),
    "tiny": (build_event({"index": 0, "text": "a"}) * 4_096, 200, 0.0),
}
"""Bytes, how often they are sent, and the pause after each in seconds."""


class HostileAgent(agent_pb2_grpc.AgentServicer):  # type: ignore[misc]
    """One agent."""

    def __init__(self, name: str, engine_url: str, *, floods: bool) -> None:
        self._floods = floods
        self._registration = agent_pb2.Registration(
            instance=name,
            deployment="d",
            model=MODEL,
            revision="wide",
            boot_id=create_boot_id(name),
            role=agent_pb2.ROLE_MIXED,
            home=agent_pb2.ROLE_MIXED,
            epoch=1,
            state=agent_pb2.STATE_READY,
            engine="vllm 0.32.0",
            engine_url=engine_url,
            max_model_len=131_072,
            kv_block_size=16,
            kv_blocks_total=100_000,
            kv_path=agent_pb2.KvPath(verified=True),
        )

    async def Watch(  # noqa: N802
        self, *_: object
    ) -> AsyncIterator[agent_pb2.WatchEvent]:
        yield agent_pb2.WatchEvent(registration=self._registration)
        while True:
            if self._floods:
                self._registration.epoch += 1
                yield agent_pb2.WatchEvent(registration=self._registration)
                continue
            load = agent_pb2.LoadReport(
                boot_id=self._registration.boot_id,
                epoch=1,
                kv_blocks_free=100_000,
                num_routers=1,
                sampled_ns=time.monotonic_ns(),
            )
            yield agent_pb2.WatchEvent(load=load)
            await asyncio.sleep(REPORT_S)

    async def Health(  # noqa: N802
        self, *_: object
    ) -> agent_pb2.HealthResponse:
        return agent_pb2.HealthResponse(registration=self._registration)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection of the gateway to the engine."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length:")[2].partition(b"\r")[0]
            body = await reader.readexactly(int(length))
            script = next(key for key in SCRIPTS if b"script-%b" % key.encode() in body)
            data, count, pause_s = SCRIPTS[script]
            writer.write(HEAD)
            for _ in range(count):
                writer.write(data)
                await writer.drain()
                await asyncio.sleep(pause_s)
            writer.write(END)
    writer.close()


async def serve(port: int, count: int, *, floods: bool) -> None:
    engine_port = port - 1
    await asyncio.start_server(answer, "127.0.0.1", engine_port)
    servers = []
    for number in range(count):
        server = grpc.aio.server()
        url = f"http://127.0.0.1:{engine_port}"
        agent = HostileAgent(f"wide-{number}", url, floods=floods and not number)
        agent_pb2_grpc.add_AgentServicer_to_server(agent, server)
        server.add_insecure_port(f"127.0.0.1:{port + number}")
        await server.start()
        servers.append(server)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), floods="flood" in sys.argv[3:]))
