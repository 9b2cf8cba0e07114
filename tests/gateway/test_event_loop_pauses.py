"""A gateway whose own event loop stalls blames no engine for it."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest

from cleave.gateway.upstream.connection_pool import EnginePool
from cleave.router.instance import Connectivity
from cleave.rpc.v1 import agent_pb2

STREAM = {"model": "m", "prompt": "hello", "max_tokens": 3, "stream": True}
PAUSE_S = 5.0


class Receiver(asyncio.Protocol):
    """Calls what it is given where the loop reads sockets, which is after all timers."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def data_received(self, data: bytes) -> None:
        self._call()


@contextlib.asynccontextmanager
async def receiving(call: Callable[[], None]) -> AsyncIterator[socket.socket]:
    """A socket; what is sent there leads to a call."""
    ours, theirs = socket.socketpair()
    with theirs:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(lambda: Receiver(call), sock=ours)
        yield theirs
        transport.close()


async def block() -> None:
    async with receiving(lambda: time.sleep(PAUSE_S)) as sender:
        sender.send(b"x")
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def reporting(stage) -> AsyncIterator[set[Connectivity]]:
    """Agents of their own processes report; the contacts that the gateway ever had with them."""
    registry, contacts, over = stage.context.router.registry, set(), threading.Event()

    def hear() -> None:
        contacts.update(each.connectivity for each in registry.instances.values())
        for name in stage.engines:
            load = agent_pb2.LoadReport(boot_id=f"boot-{name}")
            registry.on_event(name, agent_pb2.WatchEvent(load=load), time.monotonic())

    def send() -> None:
        while not over.wait(0.1):
            sender.send(b"x")

    async with receiving(hear) as sender:
        thread = threading.Thread(target=send)
        thread.start()
        yield contacts
        over.set()
        thread.join()


async def test_healthy_streams_and_agents_outlast_a_callback_that_blocks_the_loop(
    make_stage,
) -> None:
    stage = await make_stage({"a": "mixed", "b": "mixed"})
    context = stage.context
    going = asyncio.Event()

    async def stream(engine, request, writer) -> None:
        engine.send_stream_head(writer)
        while not going.is_set():
            engine.send_chunk(writer, engine.event("t"))
            await asyncio.sleep(0.4)
        engine.send_chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    for engine in stage.engines.values():
        engine.script = stream
    async with reporting(stage) as contacts:
        clients = [await stage.connect() for _ in range(4)]
        for client in clients:
            client.send(STREAM)
            await client.read_head()
        assert all(len(engine.requests) == 2 for engine in stage.engines.values())
        stall_detectors = [pool.stall_detector for pool in context._pools.values()]
        for stall_detector in stall_detectors:
            # As after minutes of streaming.
            stall_detector.longest_pause_s = 0.3
        await asyncio.sleep(1.0)
        await stage.until(
            lambda: all(
                each._progress == each._checked_progress for each in context.active_requests
            ),
            "the sweeper has seen every token so far",
        )
        await block()
        await asyncio.sleep(1.0)
        going.set()
        for client in clients:
            while await client.read_chunk():
                pass
    assert (
        max(stall_detector.compute_stall_timeout_s() for stall_detector in stall_detectors)
        < 2 * PAUSE_S
    )
    assert (dict(context.metrics.retries), dict(context.metrics.recoveries)) == ({}, {})
    assert context.circuit_breaker.list_suspects(context.clock()) == frozenset()
    assert contacts == {Connectivity.FRESH}
    await stage.until_idle()


async def test_an_engine_that_stops_after_a_pause_is_still_found(make_stage) -> None:
    stage = await make_stage({"a": "mixed", "b": "mixed"})

    async def stop(engine, request, writer) -> None:
        engine.script = None
        engine.send_stream_head(writer)
        engine.send_chunk(writer, engine.event("t"))
        await asyncio.sleep(600)

    for engine in stage.engines.values():
        engine.script = stop
    client = await stage.connect()
    client.send(STREAM)
    await client.read_head()
    (pool,) = stage.context._pools.values()
    pool.stall_detector.longest_pause_s = 0.1
    await block()
    assert not stage.context.metrics.retries
    await stage.until(
        lambda: stage.context.metrics.retries[("decode", "stall")] == 1, "it counts as hung"
    )


@pytest.mark.interpreted
@pytest.mark.parametrize("stalls", [1, 4])
async def test_a_connection_that_timed_out_while_the_gateway_stood_still_is_tried_once_more(
    make_stage, monkeypatch, stalls
) -> None:
    stage = await make_stage({"x": "mixed"}, connect_s=0.5)
    retries, seen = stage.context.metrics.retries, []
    open_connection = EnginePool._open_connection

    async def stall_and_open(pool):
        seen.append(retries["decode", "unreached"])
        if len(seen) <= stalls:
            asyncio.get_running_loop().call_soon(time.sleep, 1.2)
        return await open_connection(pool)

    monkeypatch.setattr(EnginePool, "_open_connection", stall_and_open)
    with socket.socket() as full, contextlib.ExitStack() as filling:
        # A full backlog: what comes now waits for an answer.
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(2):
            waiting = filling.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        address = f"http://127.0.0.1:{full.getsockname()[1]}"
        stage.state(stage.engines["x"], engine_url=address)
        asking = asyncio.create_task(stage.ask({"model": "m", "prompt": "hello", "max_tokens": 3}))
        await stage.until(lambda: retries["decode", "unreached"] > 0, "it is given up")
        assert seen[:2] == [0, 0]
        assert seen[2:3] in ([], [1])
        assert (await asking).status in (502, 503)
