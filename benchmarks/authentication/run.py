"""What the keys of engines and of their KV ports cost.

A request pays for a header at the gateway and for a comparison in the engine; a KV connection pays
for two proofs once. Figures are CPU times, which other work on the machine changes little; those of
KV are of both ends, which run in this process.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import torch

from cleave.gateway.http.headers import build_request_head
from cleave.rpc.engine_key import HEADER, create_key
from cleave_worker.access.engine_access import EngineAccess, EngineAccessMiddleware, find_key
from cleave_worker.transfer.block_leases import BlockLeases, FinishedPrefill
from cleave_worker.transfer.client import KvClient
from cleave_worker.transfer.handoff import Handoff, KvLayout
from cleave_worker.transfer.memory import register_tensors
from cleave_worker.transfer.server import KvServer, RegisteredKv
from cleave_worker.transfer.transport import Transport

HOST, BOUND_S, BLOCKS = "127.0.0.1", 30.0, 64
LAYOUT = KvLayout("bench", "bfloat16", 16, 4, 2, 32, "LBHNC")


def time_us(function: Callable[[], object], number: int, rounds: int = 9) -> float:
    """CPU time of a call in microseconds, the least of several rounds."""
    best = float("inf")
    for _ in range(rounds):
        begun = time.process_time()
        for _ in range(number):
            function()
        best = min(best, (time.process_time() - begun) / number)
    return best * 1e6


def measure_gateway(number: int) -> Iterator[tuple[str, float]]:
    """The head of a request to an engine, with and without the key's header."""
    key_header, none = f"{HEADER}: {create_key()}\r\n".encode(), b""
    fields = b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n"

    def build(key: bytes) -> bytes:
        return build_request_head(b"/v1/completions", b"10.1.2.3:9001", b"ab-1", 900, key + fields)

    without = time_us(lambda: build(none), number)
    yield (
        "gateway: header of a request, us more",
        time_us(lambda: build(key_header), number) - without,
    )


def measure_engine(number: int) -> Iterator[tuple[str, float]]:
    """The ASGI middleware in front of vLLM's application."""
    key = create_key()

    async def app(*_: object) -> None:
        pass

    middleware = EngineAccessMiddleware(app)
    middleware._access = EngineAccess(key)
    names = ("host", "content-type", "x-request-id", HEADER, "content-length")
    headers = [(name.encode(), key.encode()) for name in names]
    scope = {"type": "http", "path": "/v1/completions", "headers": headers}

    async def repeat(call: Callable[..., object]) -> float:
        best = float("inf")
        for _ in range(9):
            begun = time.process_time()
            for _ in range(number):
                await call(scope, None, None)  # type: ignore[misc]
            best = min(best, (time.process_time() - begun) / number)
        return best * 1e6

    async def compare() -> float:
        return await repeat(middleware) - await repeat(app)

    assert find_key(headers) == key.encode()
    yield "engine: check of a request, us more", asyncio.run(compare())


@contextmanager
def serving(key: str, transport: Transport) -> Iterator[tuple[KvServer, BlockLeases, KvClient]]:
    """A producer and a consumer."""

    def register(boot_id: str, key: str = "") -> RegisteredKv:
        tensors = [torch.zeros(BLOCKS, 2, 16, 64) for _ in range(4)]
        memory, layers = register_tensors(tensors, BLOCKS)
        return RegisteredKv(boot_id, LAYOUT, memory, tuple(layers), HOST, key=key)

    leases = BlockLeases(BOUND_S, BOUND_S)
    server = KvServer(register("producer", key), leases, (), 0, BOUND_S)
    try:
        with closing(KvClient(register("consumer"), [transport], BOUND_S)) as client:
            yield server, leases, client
    finally:
        server.close()


def measure_kv(key: str, number: int) -> dict[str, float]:
    """CPU milliseconds of both ends: a connection with its handshake, and hand-offs."""
    handshakes, firsts, furthers = [], [], []
    for _ in range(9):
        with serving(key, Transport.GLOO) as (server, leases, client):
            address = ((HOST, server.port),)
            for epoch in range(1, number + 2):
                leases.grant(f"r{epoch}", FinishedPrefill(epoch, "d", (1, 2)))
                handoff = Handoff("producer", f"r{epoch}", epoch, "d", 32, address, key=key)
                begun = time.process_time()
                client.pull(handoff, "d", 0, [5, 6])
                (furthers if epoch > 1 else firsts).append(1e3 * (time.process_time() - begun))
            (rank,) = client.resolve_ranks(handoff)
            for _ in range(number):
                begun = time.process_time()
                connection, _ = client.connect(rank, BOUND_S)
                handshakes.append(1e3 * (time.process_time() - begun))
                connection.close()
    return {
        "KV: connection and handshake, ms": statistics.median(handshakes),
        "KV: first hand-off, with its link over gloo, ms": statistics.median(firsts),
        "KV: further hand-off of two blocks, ms": statistics.median(furthers),
    }


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="checks only that it works")
    number = 50 if parser.parse_args().quick else 2_000
    for what, figure in (*measure_gateway(10 * number), *measure_engine(10 * number)):
        print(f"{what:60} {figure:8.3f}")
    without, with_key = measure_kv("", number // 10), measure_kv(create_key(), number // 10)
    for what, figure in without.items():
        print(f"{what:60} {figure:8.3f} without, {with_key[what]:.3f} with a key")


if __name__ == "__main__":
    main()
