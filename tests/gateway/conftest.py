"""A real gateway between scripted engines and a client that speaks raw bytes.

Instances are put straight into the gateway's registry; only test_server.py goes through agents.
The event loop is uvloop, as in production: its transports differ from asyncio's own.
"""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import uvloop
from aiohttp import web

from cleave.gateway.config import GatewayConfig, Timeouts
from cleave.gateway.server import GatewayServer
from cleave.perf import named_profiles
from cleave.perf.model import model_shape
from cleave.rpc.engine_key import HEADER
from cleave.rpc.v1 import agent_pb2
from cleave_worker.emulator.api import EmulatorApi
from cleave_worker.emulator.config import EmulatedEngineConfig, KvTransferConfig
from cleave_worker.emulator.engine import EmulatedEngine
from cleave_worker.emulator.scheduler import EngineLimits

from tests.support.ports import find_free_port

FAR_AWAY = 1e12
PATIENCE_S = 60
ROLES = {
    "prefill": agent_pb2.ROLE_PREFILL,
    "decode": agent_pb2.ROLE_DECODE,
    "mixed": agent_pb2.ROLE_MIXED,
}


def pytest_asyncio_loop_factories(config, item):
    return {"uvloop": uvloop.new_event_loop}


def parse_head(raw: bytes) -> tuple[str, dict[str, str]]:
    """The first line, and the headers by lower-case name."""
    first, *lines = raw.decode().removesuffix("\r\n\r\n").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return first, {name.lower(): value.strip() for name, _, value in pairs}


@dataclasses.dataclass
class EngineRequest:
    """What reached an engine."""

    path: str
    headers: dict[str, str]
    raw: bytes
    cut: bool = False
    """The gateway closed the connection before the answer was complete."""

    @property
    def body(self) -> dict:
        return json.loads(self.raw)

    @property
    def is_prefill(self) -> bool:
        return bool((self.body.get("kv_transfer_params") or {}).get("do_remote_decode"))


Answer = Callable[["FakeEngine", EngineRequest, asyncio.StreamWriter], Awaitable[None]]


class FakeEngine:
    """Answers as vLLM does, or as `script` says; keeps every request it saw."""

    def __init__(self, name: str, role: str) -> None:
        self.name = name
        self.role = role
        self.boot_id = f"boot-{name}"
        self.key = f"key-of-{name}"
        self.requests: list[EngineRequest] = []
        self.connections = 0
        self.tokens = ["one", "two", "three"]
        self.script: Answer | None = None
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()
        for writer in tuple(self._writers):
            writer.transport.abort()
        await self._server.wait_closed()
        await asyncio.sleep(0)

    def registration(self, **fields: object) -> agent_pb2.WatchEvent:
        registration = agent_pb2.Registration(
            instance=self.name,
            deployment="d",
            model="m",
            revision="r1",
            boot_id=self.boot_id,
            role=ROLES[self.role],
            state=agent_pb2.STATE_READY,
            engine_url=f"http://127.0.0.1:{self.port}",
            kv_path=agent_pb2.KvPath(verified=True),
            engine_key=self.key,
        )
        registration.MergeFrom(agent_pb2.Registration(**fields))
        return agent_pb2.WatchEvent(registration=registration)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while True:
                request = await self._read(reader)
                if request.headers.get(HEADER, "") != self.key:
                    self.send_json(writer, {"error": "The engine asks for its key."}, status=401)
                    continue
                self.requests.append(request)
                await self._answer_watched(request, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer_watched(self, request, reader, writer) -> None:
        """Answer, and notice when the gateway hangs up meanwhile."""
        answer = asyncio.ensure_future((self.script or FakeEngine.answer)(self, request, writer))
        gone = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                request.cut = True
                raise ConnectionResetError
            request.cut = isinstance(answer.exception(), ConnectionError)
            await answer
        finally:
            for task in (answer, gone):
                task.cancel()
            await asyncio.gather(answer, gone, return_exceptions=True)

    async def _read(self, reader: asyncio.StreamReader) -> EngineRequest:
        first, headers = parse_head(await reader.readuntil(b"\r\n\r\n"))
        raw = await reader.readexactly(int(headers["content-length"]))
        return EngineRequest(first.split()[1], headers, raw)

    async def answer(self, request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        """As a well-behaved engine."""
        if request.is_prefill:
            self.send_json(writer, self.prefill_answer(request))
        elif request.body.get("stream"):
            await self.stream(writer, self.tokens)
        else:
            self.send_json(writer, self.whole_answer())

    def handoff(self, request: EngineRequest | None = None) -> dict:
        """Of a request; of the last one when none is given."""
        request_id = (request or self.requests[-1]).headers["x-request-id"]
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[2, 3, 4]],
            "remote_engine_id": self.boot_id,
            "remote_request_id": f"cmpl-{request_id}-0-82a6113c",
            "remote_host": "127.0.0.1",
            "remote_port": 5601,
        }

    def prefill_answer(self, request: EngineRequest | None = None) -> dict:
        usage = {"prompt_tokens": 7, "total_tokens": 8, "completion_tokens": 1}
        return {"choices": [], "usage": usage, "kv_transfer_params": self.handoff(request)}

    def whole_answer(self) -> dict:
        usage = {"prompt_tokens": 7, "total_tokens": 10, "completion_tokens": 3}
        text = " ".join(self.tokens)
        return {"choices": [{"text": text}], "usage": usage, "kv_transfer_params": None}

    def event(self, token: str) -> bytes:
        return b'data: {"choices":[{"text":"%b"}]}\n\n' % token.encode()

    def send(self, writer, status: int, body: bytes, kind: str = "application/json") -> None:
        writer.write(
            b"HTTP/1.1 %d X\r\nserver: fake\r\ndate: today\r\ncontent-type: %b\r\n"
            b"content-length: %d\r\n\r\n%b" % (status, kind.encode(), len(body), body)
        )

    def send_json(self, writer, value: object, status: int = 200) -> None:
        self.send(writer, status, json.dumps(value, separators=(",", ":")).encode())

    def send_stream_head(self, writer) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nserver: fake\r\nx-request-id: theirs\r\n"
            b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )

    def send_chunk(self, writer, piece: bytes) -> None:
        writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    async def stream(self, writer, tokens: list[str], pause_s: float = 0.0) -> None:
        self.send_stream_head(writer)
        for token in tokens:
            self.send_chunk(writer, self.event(token))
            await writer.drain()
            await asyncio.sleep(pause_s)
        self.send_chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()


@dataclasses.dataclass
class Response:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> dict:
        return json.loads(self.body)

    @property
    def error(self) -> dict:
        return self.json()["error"]

    @property
    def events(self) -> list[bytes]:
        assert self.body.endswith(b"\n\n")
        return self.body.split(b"\n\n")[:-1]


class RawClient:
    """One connection to the gateway."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, body: object = None, path: str = "/v1/completions", **headers: str) -> None:
        self.writer.write(self.build(body, path, **headers))

    @staticmethod
    def build(body: object = None, path: str = "/v1/completions", **headers: str) -> bytes:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        method = "GET" if body is None else "POST"
        raw = b"" if body is None else raw
        fields = {"Host": "gateway", "Content-Length": str(len(raw))}
        fields |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in fields.items())]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + raw

    async def read_head(self) -> tuple[int, dict[str, str]]:
        raw = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        first, headers = parse_head(raw)
        return int(first.split()[1]), headers

    async def read_chunk(self) -> bytes:
        """One chunk; empty at the end."""
        size = int(await asyncio.wait_for(self.reader.readuntil(b"\r\n"), PATIENCE_S), 16)
        piece = await asyncio.wait_for(self.reader.readexactly(size + 2), PATIENCE_S)
        assert piece.endswith(b"\r\n")
        return piece[:-2]

    async def read(self) -> Response:
        status, headers = await self.read_head()
        if headers.get("transfer-encoding") == "chunked":
            pieces = []
            while piece := await self.read_chunk():
                pieces.append(piece)
            return Response(status, headers, b"".join(pieces))
        length = int(headers["content-length"])
        body = await asyncio.wait_for(self.reader.readexactly(length), PATIENCE_S)
        return Response(status, headers, body)

    async def is_closed(self) -> bool:
        """Whether the gateway closes the connection without another byte."""
        with contextlib.suppress(ConnectionError):
            return await asyncio.wait_for(self.reader.read(1), PATIENCE_S) == b""
        return True

    async def ask(self, body: object = None, path: str = "/v1/completions", **headers: str):
        self.send(body, path, **headers)
        return await self.read()

    def close(self) -> None:
        self.writer.transport.abort()


class Stage:
    """A gateway, its engines and its clients."""

    def __init__(self, gateway: GatewayServer) -> None:
        self.gateway = gateway
        self.context = gateway.context
        self.engines: dict[str, FakeEngine] = {}
        self._clients: list[RawClient] = []

    async def add(self, name: str, role: str) -> FakeEngine:
        engine = FakeEngine(name, role)
        await engine.start()
        self.engines[name] = engine
        self.state(engine)
        return engine

    def state(self, engine: FakeEngine, **fields: object) -> None:
        registry = self.context.router.registry
        registry.on_event(engine.name, engine.registration(**fields), FAR_AWAY)

    def hold(self) -> asyncio.Event:
        """Engines answer no more until it is set."""
        opened = asyncio.Event()

        async def wait(engine, request, writer) -> None:
            await opened.wait()
            await engine.answer(request, writer)

        for engine in self.engines.values():
            engine.script = wait
        return opened

    async def connect(self) -> RawClient:
        client = RawClient(*await asyncio.open_connection("127.0.0.1", self.gateway.port))
        self._clients.append(client)
        return client

    async def ask(self, body: object = None, path: str = "/v1/completions", **headers: str):
        client = await self.connect()
        return await client.ask(body, path, **headers)

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        for _ in range(PATIENCE_S * 100):
            if condition():
                return
            await asyncio.sleep(0.01)
        pytest.fail(f"not within {PATIENCE_S} s: {what}")

    async def until_idle(self) -> None:
        """Nothing runs, nothing is in the books."""
        await self.until(self.is_idle, "nothing is left in flight or in the books")

    def is_idle(self) -> bool:
        context = self.context
        ledgers = [i.in_flight for i in context.router.registry.instances.values()]
        return (
            not context.active_requests
            and context.num_awaiting_first_byte == context.metrics.in_flight == 0
            and all(x.num_requests == 0 for x in ledgers)
            # Predicted lengths are no whole numbers, so sums of them end near 0.
            and all(abs(book.own) < 1e-6 for x in ledgers for book in (x.prompt, x.resident))
        )

    async def close(self) -> None:
        for client in self._clients:
            client.close()
        await self.gateway.stop()
        for engine in self.engines.values():
            await engine.stop()
        await asyncio.sleep(0)
        assert not self.context.buffer_budget.used


@pytest.fixture
def internal_port() -> int:
    return find_free_port()


@pytest.fixture
async def make_stage() -> AsyncIterator[Callable[..., Awaitable[Stage]]]:
    """Starts gateways: options of GatewayConfig and Timeouts, then `name=role` engines.

    `shared_state`: of the processes of which the gateway is one.
    """
    stages: list[Stage] = []

    async def make(engines: dict[str, str], **options: object) -> Stage:
        waits = {k: options.pop(k) for k in tuple(options) if k.endswith("_s")}
        timeouts = Timeouts(**{"drain_s": 5.0, **waits})
        shared_state = options.pop("shared_state", None)
        # Engines count requests, so those of the witness only come where a test asks for them.
        options = {"witness_share": 0.0, **options}
        options = {"agents": "", **options}
        gateway = GatewayServer(GatewayConfig(port=0, timeouts=timeouts, **options), shared_state)
        await gateway.start()
        stage = Stage(gateway)
        stages.append(stage)
        for name, role in engines.items():
            await stage.add(name, role)
        return stage

    yield make
    for stage in stages:
        await stage.close()


@pytest.fixture
async def pair(make_stage) -> Stage:
    """One prefill and one decode engine."""
    return await make_stage({"p": "prefill", "d": "decode"})


@pytest.fixture
async def single(make_stage) -> Stage:
    """One mixed engine."""
    return await make_stage({"x": "mixed"})


class Emulated:
    """One emulated engine behind HTTP, which can be ended and come back."""

    def __init__(
        self, boot_id: str, adapters: tuple[str, ...], time_scale: float, recomputes: bool
    ) -> None:
        self.engine = EmulatedEngine(
            EmulatedEngineConfig(
                served_model_name="m",
                shape=model_shape.load_shape("opt-13b"),
                profile=named_profiles.load_profile("distserve/opt-13b/tp1"),
                max_model_len=2048,
                limits=EngineLimits(max_num_seqs=64, max_num_batched_tokens=512),
                block_size=16,
                num_blocks=1_000,
                time_scale=time_scale,
                kv_transfer=KvTransferConfig(
                    boot_id, "127.0.0.1", 0, recompute_on_failure=recomputes
                ),
                adapters=adapters,
            )
        )
        app = EmulatorApi(self.engine).build_application()
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        self.url = ""

    async def start(self) -> None:
        await self.engine.start()
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self.engine.stop()
        await self._runner.cleanup()


@pytest.fixture
async def emulate() -> AsyncIterator[Callable[..., Awaitable[Emulated]]]:
    """Starts emulated engines."""
    started: list[Emulated] = []

    async def start(
        boot_id: str,
        adapters: tuple[str, ...] = (),
        time_scale: float = 0.02,
        recomputes: bool = False,
    ) -> Emulated:
        emulated = Emulated(boot_id, adapters, time_scale, recomputes)
        await emulated.start()
        started.append(emulated)
        return emulated

    yield start
    for emulated in started:
        await emulated.stop()


@pytest.fixture
def make_fleet(make_stage, emulate):
    """Stages whose engines are emulated: the stage and its engines by name."""

    async def make(
        roles: dict[str, str],
        adapters: tuple[str, ...] = (),
        time_scale: float = 0.02,
        recomputes: bool = False,
        **options: float,
    ):
        stage = await make_stage(roles, **options)
        engines = {}
        for name in roles:
            engines[name] = await emulate(f"boot-{name}", adapters, time_scale, recomputes)
            fields = {"engine_url": engines[name].url, "adapters": adapters}
            stage.state(stage.engines[name], max_model_len=2048, **fields)
        return stage, engines

    return make
