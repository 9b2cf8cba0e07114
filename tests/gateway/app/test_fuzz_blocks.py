"""No input holds a gateway's event loop for more than 5 ms, however large, wide, deep or odd it is.

A real gateway before 1,024 instances, of which each callback is measured; clients and engines are
threads. Time is the CPU time of the loop's thread, and an input fails only if it is slow three
times. Collections of garbage count: those that happen in the callback.

For a long run, with bodies and answers of up to 16 MiB:
FUZZ_INPUTS=20000 pytest tests/gateway/app/test_fuzz_blocks.py --timeout=0
"""

import asyncio
import contextlib
import gc
import os
import selectors
import socket
import socketserver
import threading
import time
from collections.abc import Iterator

import pytest

from cleave.gateway.config import GatewayConfig, Timeouts
from cleave.gateway.garbage_collection import collect_in_steps
from cleave.gateway.proxy.attempt import MAX_RESPONSE_BYTES
from cleave.gateway.server import GatewayServer
from cleave.gateway.upstream.collected_answer import MAX_DECODED_BYTES
from cleave.rpc.engine_key import HEADER
from cleave.rpc.v1 import agent_pb2

from tests.support.block_inputs import (
    BEGINS,
    LARGE_SIZES,
    MODEL,
    SIZES,
    BlockInput,
    InputGenerator,
    build_handoff,
    frame,
)
from tests.support.loop_blocks import LIMIT_S, Block, BlockRecorder, measured_blocks
from tests.support.ports import find_free_port

pytestmark = pytest.mark.interpreted

NUM_INPUTS = int(os.environ.get("FUZZ_INPUTS", "120"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
INSTANCES = 1_024
ROLES = (agent_pb2.ROLE_PREFILL, agent_pb2.ROLE_DECODE, agent_pb2.ROLE_MIXED)
PATIENCE_S = 60.0
FAR_AWAY = 1e12


class Engine(socketserver.BaseRequestHandler):
    """One connection of the gateway to an engine."""

    server: "EngineServer"

    def handle(self) -> None:
        with contextlib.suppress(OSError), self.request.makefile("rb") as file:
            while lines := read_head(file):
                body = file.read(int(lines[b"content-length"]))
                boot_id = lines[HEADER.encode()].decode()
                if b'"do_remote_decode":true' in body:
                    request_id = lines[b"x-request-id"].decode()
                    answer = frame(build_handoff(boot_id, request_id))
                else:
                    answer = self.server.answer
                self.request.sendall(answer)


class EngineServer(socketserver.ThreadingTCPServer):
    """All engines; a request's key says whose it is."""

    daemon_threads = True
    request_queue_size = 100
    answer = b""


def read_head(file) -> dict[bytes, bytes]:
    lines = {}
    while (line := file.readline()) not in (b"\r\n", b""):
        name, _, value = line.partition(b":")
        lines[name.lower()] = value.strip()
    return lines


def exchange(port: int, raw: bytes) -> bytes:
    """Send; the beginning of the answer, once it is complete or the gateway closes."""
    begun, end, size, unsent = b"", b"", 0, memoryview(raw)
    deadline = time.monotonic() + PATIENCE_S
    with (
        socket.create_connection(("127.0.0.1", port)) as sock,
        selectors.DefaultSelector() as ready,
    ):
        sock.setblocking(False)
        ready.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE)
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < deadline:
                for _, events in ready.select(1.0):
                    if events & selectors.EVENT_READ:
                        if not (data := sock.recv(1 << 18)):
                            return begun
                        begun, end, size = (
                            (begun + data)[:4096],
                            (end + data)[-8:],
                            size + len(data),
                        )
                        if is_complete(begun, end, size):
                            return begun
                    elif unsent:
                        unsent = unsent[sock.send(unsent[: 1 << 18]) :]
                        if not unsent:
                            ready.modify(sock, selectors.EVENT_READ)
    return begun


def build_request(path: bytes) -> bytes:
    body = BEGINS[path] + b'"user":"a"}'
    head = b"POST %b HTTP/1.1\r\nhost: g\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    return head % (path, len(body)) + body


def count_received(port: int, raw: bytes) -> int:
    """Bytes of an answer's body until the gateway closes; the client begins to read late."""
    with (
        socket.create_connection(("127.0.0.1", port), PATIENCE_S) as sock,
        sock.makefile("rb") as file,
    ):
        sock.sendall(raw)
        head = read_head(file)
        time.sleep(0.5)
        return len(file.read(int(head[b"content-length"])))


def is_complete(begun: bytes, end: bytes, size: int) -> bool:
    head, mark, _ = begun.partition(b"\r\n\r\n")
    if not mark:
        return False
    length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
    if length:
        return size >= len(head) + len(mark) + int(length)
    return end.endswith(b"0\r\n\r\n")


class MeasuredGateway:
    """A gateway whose callbacks are measured, and the threads around it."""

    def __init__(self, recorder: BlockRecorder, runner: asyncio.Runner) -> None:
        self.recorder = recorder
        self._runner = runner
        self._engines = EngineServer(("127.0.0.1", 0), Engine)
        threading.Thread(target=self._engines.serve_forever, args=(0.05,), daemon=True).start()
        config = GatewayConfig(
            agents="",
            port=0,
            internal_port=find_free_port(),
            timeouts=Timeouts(drain_s=1),
            witness_share=0.0,
        )
        self._gateway = GatewayServer(config)
        runner.run(self._gateway.start())
        self._ports = self._gateway.port, config.internal_port
        registry = self._gateway.context.router.registry
        rebuild, registry._rebuild = registry._rebuild, lambda: None
        for number in range(INSTANCES):
            registry.on_event(f"i{number}", self._register(number), FAR_AWAY)
        registry._rebuild = rebuild
        registry.on_event("i0", self._register(0), FAR_AWAY)

    def _register(self, number: int) -> agent_pb2.WatchEvent:
        registration = agent_pb2.Registration(
            instance=f"i{number}",
            deployment="d",
            model=MODEL,
            revision="r",
            boot_id=f"boot-{number}",
            role=ROLES[number % 3],
            state=agent_pb2.STATE_READY,
            engine_url=f"http://127.0.0.1:{self._engines.server_address[1]}",
            engine_key=f"boot-{number}",
            kv_path=agent_pb2.KvPath(verified=True),
        )
        return agent_pb2.WatchEvent(registration=registration)

    def measure(self, tried: BlockInput) -> tuple[Block, bytes]:
        """The longest callback of an input, and the beginning of its answer."""
        return self._runner.run(self._measure(tried))

    async def collect_garbage(self) -> None:
        """As gateways do, from now on."""
        self._collecting = asyncio.create_task(collect_in_steps())

    async def _measure(self, tried: BlockInput) -> tuple[Block, bytes]:
        self._engines.answer = tried.answer
        self.recorder.forget()
        port = self._ports[tried.is_internal]
        answer = await asyncio.to_thread(exchange, port, tried.raw)
        context = self._gateway.context
        for _ in range(500):
            if not context.clients and not context.active_requests:
                break
            await asyncio.sleep(0.002)
        return self.recorder.worst, answer

    def receive(self, raw: bytes, answer: bytes) -> int:
        """How much of an answer's body a client gets that reads slowly."""
        self._engines.answer = answer
        return self._runner.run(asyncio.to_thread(count_received, self._ports[0], raw))

    def stop(self) -> None:
        self._collecting.cancel()
        self._runner.run(self._gateway.stop())
        self._engines.shutdown()
        self._engines.server_close()


@pytest.fixture(scope="module")
def gateway() -> Iterator[MeasuredGateway]:

    thresholds = gc.get_threshold()
    with measured_blocks() as (recorder, runner):
        measured = MeasuredGateway(recorder, runner)
        gc.collect()
        runner.run(measured.collect_garbage())
        yield measured
        measured.stop()
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def find_block(gateway: MeasuredGateway, tried: BlockInput) -> tuple[Block, bytes]:
    """The longest callback of an input; if it is too long, the shortest of three times."""
    found, answer = gateway.measure(tried)
    for _ in range(2):
        if found.cpu_s <= LIMIT_S:
            break
        again, _ = gateway.measure(tried)
        found = min(found, again, key=lambda each: each.cpu_s)
    return found, answer


def test_no_input_holds_the_event_loop(gateway) -> None:
    inputs = InputGenerator(SEED, LARGE_SIZES if "FUZZ_INPUTS" in os.environ else SIZES)
    blocks, statuses = [], set()
    for _ in range(NUM_INPUTS):
        tried = inputs.build_input()
        block, answer = find_block(gateway, tried)
        blocks.append((block.cpu_s, tried.name, block))
        statuses.add(answer[9:12])
    blocks.sort(key=lambda each: -each[0])
    report = "\n".join(f"{block}: {name}" for _, name, block in blocks[:20])
    print(f"{NUM_INPUTS} inputs, statuses {statuses}; the longest blocks:\n{report}")
    assert {b"200", b"400"} <= statuses, "some are served"
    assert blocks[0][0] <= LIMIT_S, report


LARGE = 16 << 20
CALL = b'{"id":"a","type":"function","function":{"name":"f","arguments":"{}"}}'
USAGE = b'"usage":{"prompt_tokens":1,"completion_tokens":1}'
LARGE_ANSWERS = {
    "text": (200, b'{"choices":[{"text":"%b"}],' + USAGE + b',"kv_transfer_params":null}', b"a b "),
    "no usage": (200, b'{"choices":[{"text":"%b"}]}', b"a b "),
    "an error": (400, b'{"error":{"message":"%b"}}', b"a"),
    "a fault": (500, b'{"error":{"message":"%b"}}', b"a"),
    "choices": (200, b'{"choices":[%b{}],' + USAGE + b"}", b'{"usage":{}},'),
    "handoffs": (200, b'{"choices":[%b{}],' + USAGE + b"}", b'{"kv_transfer_params":0},'),
    "a handoff": (200, b'{"choices":[],"kv_transfer_params":[%b0]}', b"[1,2],"),
    "escapes": (200, b'{"choices":[{"text":"%b"}],"kv_transfer_params":null}', b"\\u0001"),
}


@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/embeddings", b"/v1/responses"])
def test_no_large_answer_holds_the_event_loop(gateway, path: bytes) -> None:
    for name, (status, body, unit) in LARGE_ANSWERS.items():
        answer = frame(body.replace(b"%b", unit * (LARGE // len(unit))), status)
        block, _ = find_block(gateway, BlockInput(name, build_request(path), answer))
        assert block.cpu_s <= LIMIT_S, f"{name}: {block}"


@pytest.mark.parametrize("unit", [b'{"usage":{}},', b"{},", CALL + b","])
def test_no_translated_answer_holds_the_event_loop(gateway, unit: bytes) -> None:
    """Of the largest size that is decoded."""
    units = unit * ((MAX_DECODED_BYTES - 200) // len(unit)) + unit[:-1]
    message = b'{"message":{"tool_calls":[%b]}}'
    for choices in (units, message.replace(b"%b", units)):
        answer = frame(b'{"choices":[%b],%b}' % (choices, USAGE))
        block, _ = find_block(gateway, BlockInput("", build_request(b"/v1/responses"), answer))
        assert block.cpu_s <= LIMIT_S, str(block)


def test_the_largest_answer_reaches_a_client_that_reads_it_slowly(gateway) -> None:
    """It is not counted twice in the budget of buffers."""
    body = b'{"data":["%b"]}' % (b"a" * (MAX_RESPONSE_BYTES - 100))
    assert gateway.receive(build_request(b"/v1/embeddings"), frame(body)) == len(body)
