"""A gateway whose client and engine speak raw bytes, and strict parsers that read what it sends."""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import h11
import uvloop
from hypothesis import HealthCheck, settings

from cleave.gateway.config import GatewayConfig, Timeouts
from cleave.gateway.server import GatewayServer
from cleave.rpc.v1 import agent_pb2

PATIENCE_S = 20
THOROUGH = settings(deadline=None, suppress_health_check=list(HealthCheck))


@dataclass
class Engine:
    """Answers every request alike, and keeps what a strict parser makes of them."""

    prompts: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while await self._answer(reader, writer):
                pass
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        parser, body = h11.Connection(h11.SERVER), b""
        while True:
            try:
                event = parser.next_event()
            except h11.ProtocolError as error:
                self.faults.append(str(error))
                return False
            if event is h11.NEED_DATA:
                data = await reader.read(1 << 16)
                if not data:
                    return False
                parser.receive_data(data)
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                break
        if parser.trailing_data[0]:
            self.faults.append(f"more than one request: {parser.trailing_data[0]!r}")
        status = 200
        try:
            self.prompts.append(json.loads(body)["prompt"])
        except (ValueError, KeyError):
            status = 400
        answer = b'{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}'
        writer.write(
            b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (status, len(answer), answer)
        )
        return True


class FuzzedGateway:
    """A gateway before one engine."""

    def __init__(self, runner: asyncio.Runner, engine: Any = None, **options: Any) -> None:
        """`engine`: with a coroutine `serve`; `options`: of the gateway's configuration."""
        self.engine = engine or Engine()
        self.run = runner.run
        self.run(self._start(options))

    async def _start(self, options: dict[str, Any]) -> None:
        self._server = await asyncio.start_server(self.engine.serve, "127.0.0.1")
        port = self._server.sockets[0].getsockname()[1]
        timeouts = Timeouts(drain_s=1)
        fixed = {"agents": "", "port": 0, "max_body_bytes": 1 << 16, "timeouts": timeouts}
        config = GatewayConfig(**fixed, **options)
        self.gateway = GatewayServer(config)
        await self.gateway.start()
        registration = agent_pb2.Registration(
            instance="x",
            model="m",
            boot_id="boot",
            role=agent_pb2.ROLE_MIXED,
            state=agent_pb2.STATE_READY,
            engine_url=f"http://127.0.0.1:{port}",
        )
        event = agent_pb2.WatchEvent(registration=registration)
        self.gateway.context.router.registry.on_event("x", event, 1e12)

    async def stop(self) -> None:
        await self.gateway.stop()
        self._server.close()
        await self._server.wait_closed()

    def send(self, pieces: list[bytes], expected: int | None) -> list[int]:
        """The statuses of the answers: so many, or all until the gateway closes."""
        self.engine.prompts.clear()
        return self.run(asyncio.wait_for(self._send(pieces, expected), PATIENCE_S))

    async def _send(self, pieces: list[bytes], expected: int | None) -> list[int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.gateway.port)
        writing = asyncio.create_task(write(writer, pieces))
        try:
            return await read_statuses(reader, expected)
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            writer.transport.abort()


async def write(writer: asyncio.StreamWriter, pieces: list[bytes]) -> None:
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)


async def read_statuses(reader: asyncio.StreamReader, expected: int | None) -> list[int]:
    statuses: list[int] = []
    data = b""
    while expected is None or len(statuses) < expected:
        parser = h11.Connection(h11.CLIENT)
        parser.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
        parser.send(h11.EndOfMessage())
        if data:
            parser.receive_data(data)
        while not isinstance(event := parser.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                statuses.append(event.status_code)
            elif event is h11.NEED_DATA:
                more = b""
                # What it leaves unread resets the connection.
                with contextlib.suppress(ConnectionResetError):
                    more = await reader.read(1 << 16)
                if not more:
                    assert expected is None, f"closed after {statuses}"
                    assert parser.their_state is h11.SEND_RESPONSE, "closed inside an answer"
                    assert not parser.trailing_data[0]
                    return statuses
                parser.receive_data(more)
        data = parser.trailing_data[0]
    return statuses


@contextlib.contextmanager
def run_gateway(engine: Any = None, **options: Any) -> Iterator[FuzzedGateway]:
    """As FuzzedGateway's arguments."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        fuzzed_gateway = FuzzedGateway(runner, engine, **options)
        yield fuzzed_gateway
        fuzzed_gateway.run(fuzzed_gateway.stop())
