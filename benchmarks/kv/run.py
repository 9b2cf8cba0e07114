"""How fast KV moves between two engines of this machine, beside what the link itself gives.

Run from the root: `.venv/bin/python benchmarks/kv/run.py [--gib 3]`. Two processes hold KV of the
shape of a real model; one pulls prompts of 512 to 32,768 tokens from the other, as the KV connector
does: question, grant, bytes, release. NIXL, where it is installed, reads the same blocks. The limit
beside it is one plain copy of mapped memory, or one plain TCP stream over loopback.
"""

import argparse
import itertools
import json
import multiprocessing
import random
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection

import torch
from rich.console import Console
from rich.table import Table

from cleave_worker.transfer.holds import Held, Holds
from cleave_worker.transfer.identity import HandOff, Layout, prompt_digest
from cleave_worker.transfer.link import Way
from cleave_worker.transfer.memory import Memory, Move, Span, register
from cleave_worker.transfer.owner import Kept, Owner
from cleave_worker.transfer.reader import Reader
from cleave_worker.transfer.shared import SharedMemory, SharedRegion, share

try:
    import nixl_pull
except ImportError:
    nixl_pull = None  # type: ignore[assignment]

HOST = "127.0.0.1"
NIXL = "nixl"
BOUND_S = 120.0
BLOCK_TOKENS = 16
TOKENS = (512, 2_048, 8_192, 16_384, 32_768)
LIMIT_BYTES = 256 << 20
CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """One rank's share of a model's KV in 16 bits."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_size: int = 128

    @property
    def block_bytes(self) -> int:
        """One block of one layer, keys and values."""
        return 2 * 2 * BLOCK_TOKENS * self.num_kv_heads * self.head_size

    def kv_bytes(self, tokens: int) -> int:
        """All layers."""
        return self.num_layers * self.block_bytes * tokens // BLOCK_TOKENS


SHAPES = (Shape("8B", 32, 8), Shape("70B, a quarter", 80, 2))


@dataclass(frozen=True, slots=True)
class Line:
    """One row; all figures are medians over the rounds, but `spread`: slowest over fastest."""

    way: str
    shape: str
    tokens: int
    blocks: str
    mib: float
    ms: float
    gb_per_s: float
    spread: float
    of_limit: float


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=3.0, help="most KV on each side")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        line for shape in SHAPES for line in measure(shape, int(args.gib * 2**30), args.rounds)
    ]
    if args.json:
        print(json.dumps([asdict(line) for line in lines], indent=1))
    else:
        show(lines)


def measure(shape: Shape, room: int, rounds: int) -> Iterator[Line]:
    """All sizes of a shape that fit."""
    sizes = [tokens for tokens in TOKENS if shape.kv_bytes(tokens) <= room]
    num_blocks = max(sizes) // BLOCK_TOKENS
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=own, args=(there, shape, num_blocks), daemon=True
    )
    process.start()
    try:
        port, shared, limit_port = here.recv()
        kept = keep("boot-d", shape, num_blocks)
        with socket.create_connection((HOST, limit_port)) as stream:
            limits: dict[str, Callable[[], float]] = {
                Way.SHARED_MEMORY: partial(copied, kept.memory, shared),
                Way.GLOO: partial(streamed, stream),
            }
            if nixl_pull:
                limits[NIXL] = limits[Way.SHARED_MEMORY]
            for way, limit in limits.items():
                pull = puller(way, kept, here, port)
                for tokens, scattered in itertools.product(sizes, (False, True)):
                    yield line(way, shape, tokens, scattered, rounds, pull, limit)
    finally:
        process.kill()
        process.join(BOUND_S)


def line(
    way: str,
    shape: Shape,
    tokens: int,
    scattered: bool,
    rounds: int,
    pull: Callable[[list[int]], float],
    limit: Callable[[], float],
) -> Line:
    """One size, once to warm up and then `rounds` times, each beside what the link gives then."""
    blocks = list(range(tokens // BLOCK_TOKENS))
    if scattered:
        random.Random(tokens).shuffle(blocks)
    size = shape.kv_bytes(tokens)
    pairs = [(pull(blocks), limit()) for _ in range(rounds + 1)][1:]
    seconds = [pulled for pulled, _ in pairs]
    median = statistics.median(seconds)
    return Line(
        way,
        shape.name,
        tokens,
        "scattered" if scattered else "in one piece",
        size / 2**20,
        1e3 * median,
        size / median / 1e9,
        max(seconds) / min(seconds),
        statistics.median(size / pulled / limit for pulled, limit in pairs),
    )


def puller(way: str, kept: Kept, owner: Connection, port: int) -> Callable[[list[int]], float]:
    """What pulls blocks this way and tells the seconds."""
    if way != NIXL:
        return Puller(owner, port, kept, Way(way)).pull
    owner.send(None)
    side = nixl_pull.Side(kept)
    side.meet(owner.recv())
    return side.pull


class Puller:
    """Has prompts held by the other process, and pulls them."""

    def __init__(self, owner: Connection, port: int, kept: Kept, way: Way) -> None:
        self._owner = owner
        self._port = port
        self._reader = Reader(kept, 0, [way], BOUND_S)
        self._epochs = itertools.count(1)

    def pull(self, blocks: list[int]) -> float:
        """Seconds from the question to the owner's last word."""
        epoch = next(self._epochs)
        request_id, digest = f"r{epoch}", prompt_digest([epoch])
        self._owner.send((request_id, Held(epoch, digest, tuple(blocks))))
        self._owner.recv()
        addresses = ((HOST, self._port),)
        hand_off = HandOff("boot-p", request_id, epoch, digest, 0, addresses)
        begun = time.perf_counter()
        self._reader.pull(hand_off, digest, 0, sorted(blocks))
        return time.perf_counter() - begun


def own(orders: Connection, shape: Shape, num_blocks: int) -> None:
    """The other process: holds what it is told to, serves it, and streams for the limit."""
    torch.set_num_threads(1)
    kept = keep("boot-p", shape, num_blocks)
    shared = share(kept.memory)
    holds = Holds(BOUND_S, BOUND_S)
    owner = Owner(kept, holds, shared, 0, BOUND_S)
    with socket.create_server((HOST, 0)) as listening:
        threading.Thread(target=stream, args=(listening,), daemon=True).start()
        orders.send((owner.port, shared, listening.getsockname()[1]))
        while True:
            order = orders.recv()
            if order is None:
                # Not before: its progress thread keeps a core busy.
                side = nixl_pull.Side(kept)
                orders.send(side.told)
            else:
                holds.hold(*order)
                orders.send(None)


def stream(listening: socket.socket) -> None:
    """Send for the limit, each time that a byte comes."""
    connected, _ = listening.accept()
    block = memoryview(bytes(CHUNK_BYTES))
    with connected:
        while connected.recv(1):
            for _ in range(LIMIT_BYTES // CHUNK_BYTES):
                connected.sendall(block)


def keep(boot_id: str, shape: Shape, num_blocks: int) -> Kept:
    """KV of a shape, every page written once."""
    layers = [
        torch.ones(num_blocks, shape.block_bytes, dtype=torch.uint8)
        for _ in range(shape.num_layers)
    ]
    memory, planes = register(layers, num_blocks)
    sizes = (1, 1, shape.num_layers, shape.num_kv_heads, shape.head_size)
    layout = Layout(shape.name, "bfloat16", BLOCK_TOKENS, *sizes, "benchmark")
    return Kept(boot_id, layout, memory, tuple(planes), HOST)


def copied(memory: Memory, shared: tuple[SharedRegion, ...]) -> float:
    """Bytes per second of plain copies out of the other process's memory, a layer at a time."""
    link = SharedMemory(memory, shared)
    whole: list[Move] = []
    size = 0
    for number, region in enumerate(memory.regions):
        if size < LIMIT_BYTES:
            span = Span(number, 0, region.numel())
            whole.append(Move(span, span))
            size += span.length
    link.read(whole, BOUND_S)  # Maps the pages.
    begun = time.perf_counter()
    link.read(whole, BOUND_S)
    seconds = time.perf_counter() - begun
    link.close()
    return size / seconds


def streamed(connected: socket.socket) -> float:
    """Bytes per second of one plain TCP stream."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    begun = time.perf_counter()
    connected.send(b"x")
    left = LIMIT_BYTES
    while left:
        left -= connected.recv_into(buffer, min(left, CHUNK_BYTES))
    return LIMIT_BYTES / (time.perf_counter() - begun)


def show(lines: list[Line]) -> None:
    """As a table."""
    table = Table("way", "KV of", "tokens", "blocks", "MiB", "ms", "GB/s", "spread", "of limit")
    for line in lines:
        table.add_row(
            line.way,
            line.shape,
            f"{line.tokens:,}",
            line.blocks,
            f"{line.mib:,.0f}",
            f"{line.ms:.2f}",
            f"{line.gb_per_s:.2f}",
            f"{line.spread:.2f}",
            f"{line.of_limit:.0%}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
