"""The measuring equipment against itself, and the load generator against every fault it names."""

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support.ports import find_free_port

TOKENS = 4


def free_address() -> str:
    return f"127.0.0.1:{find_free_port()}"


@contextlib.contextmanager
def running(*command: str | Path) -> Iterator[str]:
    """A tool that listens, for as long as the block lasts; yields its address."""
    address = free_address()
    process = subprocess.Popen([*map(str, command), "--listen", address])
    try:
        wait_listening(address)
        yield address
    finally:
        process.terminate()
        process.wait(10)


def wait_listening(address: str) -> None:
    host, port = address.split(":")
    for _ in range(500):
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection((host, int(port)), 1).close()
            return
        time.sleep(0.01)
    raise TimeoutError(address)


async def run_load(tools: Path, target: str, *options: str) -> tuple[int, str]:
    """One request per connection; exit status and what was printed."""
    command = [str(tools / "load"), "--target", target, "--seconds", "0", *options]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await asyncio.wait_for(process.communicate(), 30)
    return process.returncode or 0, output.decode()


# ---- engine, relay and load together ----


@pytest.mark.parametrize("awake", ["0", "1"], ids=["asleep", "awake"])
@pytest.mark.parametrize("step_us", ["0", "500"])
async def test_streams_through_the_relay_arrive_complete(
    tools: Path, step_us: str, awake: str
) -> None:
    engine = (tools / "engine", "--role", "mixed", "--boot-id", "m", "--step-us", step_us)
    options = "--connections", "8", "--tokens", "20", "--awake", awake
    with (
        running(*engine, "--awake", awake) as at,
        running(tools / "relay", "--engine", at) as relay,
    ):
        status, output = await run_load(tools, relay, *options)
    assert status == 0, output
    assert json.loads(output)["requests"] == 8


async def test_prefill_and_decode_through_the_relay_arrive_complete(tools: Path) -> None:
    engine = tools / "engine"
    with (
        running(engine, "--role", "prefill", "--boot-id", "p") as prefill,
        running(engine, "--role", "decode", "--boot-id", "d", "--peer", "p") as decode,
        running(tools / "relay", "--engine", decode, "--prefill", prefill) as relay,
    ):
        status, output = await run_load(tools, relay, "--connections", "8", "--tokens", "20")
    assert status == 0, output


async def test_a_decode_engine_refuses_a_request_without_a_hand_off(tools: Path) -> None:
    engine = (tools / "engine", "--role", "decode", "--boot-id", "d", "--peer", "p")
    with running(*engine) as at:
        status, output = await run_load(tools, at, "--connections", "1", "--tokens", "4")
    assert status == 1
    assert "without a hand-off" in output


async def test_a_decode_engine_refuses_the_hand_off_of_an_unknown_engine(tools: Path) -> None:
    engine = tools / "engine"
    with (
        running(engine, "--role", "prefill", "--boot-id", "other") as prefill,
        running(engine, "--role", "decode", "--boot-id", "d", "--peer", "p") as decode,
        running(tools / "relay", "--engine", decode, "--prefill", prefill) as relay,
    ):
        status, output = await run_load(tools, relay, "--connections", "1", "--tokens", "4")
    assert status == 1
    assert "unknown engine" in output


async def test_a_prefill_engine_refuses_to_decode(tools: Path) -> None:
    with running(tools / "engine", "--role", "prefill", "--boot-id", "p") as at:
        status, output = await run_load(tools, at, "--connections", "1", "--tokens", "4")
    assert status == 1
    assert "not a prefill" in output


async def test_a_whole_answer_may_not_carry_a_hand_off_member(tools: Path) -> None:
    options = ("--connections", "1", "--tokens", "4", "--stream", "0")
    with running(tools / "engine", "--role", "mixed", "--boot-id", "m") as at:
        refused, output = await run_load(tools, at, *options)
        allowed, _ = await run_load(tools, at, *options, "--allow-hand-off", "1")
    assert (refused, allowed) == (1, 0)
    assert "leaked" in output


# ---- faults in streams ----


def token(index: int, seed: int) -> str:
    delta = json.dumps({"content": f" t{index:05d}.s{seed}"}, separators=(",", ":"))
    return f'{{"choices":[{{"index":0,"delta":{delta}}}]}}'


def events(request: str) -> list[str]:
    """The right answer: a role, the tokens, the end."""
    seed = int(re.findall(r'"content":"s(\d+)', request)[0])
    count = int(re.findall(r'"max_tokens":(\d+)', request)[0])
    role = '{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}'
    return [role, *(token(i, seed) for i in range(count)), "[DONE]"]


FAULTS = {
    "a lost token": lambda e: e[:2] + e[3:],
    "a doubled token": lambda e: [*e[:2], e[1], *e[2:]],
    "swapped tokens": lambda e: [e[0], e[2], e[1], *e[3:]],
    "a token of another request": lambda e: [e[0], token(0, 7), *e[2:]],
    "no end": lambda e: e[:-1],
    "an early end": lambda e: [*e[:-2], e[-1]],
    "a token too many": lambda e: [*e, e[-2]],
    "a leaked hand-off": lambda e: [e[0][:-1] + ',"kv_transfer_params":{}}', *e[1:]],
}


@contextlib.asynccontextmanager
async def answering(change) -> AsyncIterator[str]:
    """A server that streams `change(the right events)` to every request."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(re.findall(rb"Content-Length: (\d+)", head)[0])
        request = (await reader.readexactly(length)).decode()
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for event in change(events(request)):
            data = f"data: {event}\n\n".encode()
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        writer.write(b"0\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            await writer.drain()
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}"


async def test_the_right_stream_is_accepted(tools: Path) -> None:
    async with answering(lambda e: e) as at:
        status, output = await run_load(tools, at, "--connections", "1", "--tokens", str(TOKENS))
    assert status == 0, output


@pytest.mark.parametrize("fault", FAULTS)
async def test_the_load_generator_ends_with_failure_at(tools: Path, fault: str) -> None:
    async with answering(FAULTS[fault]) as at:
        status, output = await run_load(tools, at, "--connections", "1", "--tokens", str(TOKENS))
    assert status == 1
    assert output.startswith("load: ")
