"""Two processes with KV of the shape of a real model, one of which pulls from the other.

Used by run.py on one host and by limited_bandwidth.py over a shaped link. The owner holds the
requested blocks and serves them; the puller does what the KV connector does: question, grant,
bytes, release. Beside both is what the link itself gives: one plain copy of mapped memory, or one
plain TCP stream.
"""

import itertools
import multiprocessing
import random
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from cleave_worker.transfer.block_leases import BlockLeases, FinishedPrefill
from cleave_worker.transfer.client import KvClient
from cleave_worker.transfer.handoff import Handoff, KvLayout, compute_prompt_digest
from cleave_worker.transfer.memory import ByteRange, Memory, RangeCopy, register_tensors
from cleave_worker.transfer.server import KvServer, RegisteredKv
from cleave_worker.transfer.transport import Transport
from cleave_worker.transfer.transports.shared_memory import (
    SharedMemoryLink,
    SharedRegion,
    share_memory,
)

try:
    import nixl_pull
except ImportError:
    nixl_pull = None  # type: ignore[assignment]

NIXL = "nixl"
"""Alone, as vLLM's own connector uses it."""
OVER_NIXL = "cleave nixl"
"""One of our ways, by a name that differs from the one above."""
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

    def sizes(self, room: int) -> list[int]:
        """Prompt tokens whose KV fits."""
        return [tokens for tokens in TOKENS if self.kv_bytes(tokens) <= room]


SHAPES = (Shape("8B", 32, 8), Shape("70B, a quarter", 80, 2))


@dataclass(frozen=True, slots=True)
class Place:
    """Where the two processes are."""

    owner_host: str
    puller_host: str
    prepare: Callable[[], None] | None = None
    """Called first of all in the owner's process; can be pickled."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Medians over the rounds, but `spread`: slowest over fastest."""

    seconds: float
    spread: float
    of_limit: float
    """Rate over that of the link itself, measured right after each pull."""

    def gb_per_s(self, size: int) -> float:
        """Rate of so many bytes."""
        return size / self.seconds / 1e9


@dataclass(frozen=True, slots=True)
class Pair:
    """The puller's process is this one."""

    registered: RegisteredKv
    shape: Shape
    orders: Connection
    owner: tuple[str, int]
    shared: tuple[SharedRegion, ...]
    stream: socket.socket

    def puller(self, way: str) -> Callable[[list[int]], float]:
        """A function that pulls blocks this way and returns the seconds."""
        if way != NIXL:
            return Puller(self.orders, self.owner, self.registered, way_of(way)).pull
        self.orders.send(None)
        side = nixl_pull.Side(self.registered)
        side.meet(self.orders.recv())
        return side.pull

    def copied(self) -> float:
        """Bytes per second of plain copies out of the owner's memory."""
        return copied(self.registered.memory, self.shared)

    def streamed(self) -> float:
        """Bytes per second of one plain TCP stream from the owner's process."""
        return streamed(self.stream)


def way_of(name: str) -> Transport:
    """One of our ways by its name in tables."""
    return Transport.NIXL if name == OVER_NIXL else Transport(name)


@contextmanager
def opened(shape: Shape, num_blocks: int, place: Place) -> Iterator[Pair]:
    """Both sides, until the end."""
    spawn = multiprocessing.get_context("spawn")
    here, child_end = spawn.Pipe()
    process = spawn.Process(target=own, args=(child_end, shape, num_blocks, place), daemon=True)
    process.start()
    # Its end is seen here, then.
    child_end.close()
    try:
        assert here.poll(BOUND_S), "the owner's process says nothing"
        port, shared, limit_port = here.recv()
        registered = keep("boot-d", shape, num_blocks, place.puller_host)
        with socket.create_connection((place.owner_host, limit_port), BOUND_S) as stream:
            stream.settimeout(BOUND_S)
            yield Pair(registered, shape, here, (place.owner_host, port), shared, stream)
    finally:
        process.kill()
        process.join(BOUND_S)


def timed(
    pull: Callable[[list[int]], float],
    limit: Callable[[], float],
    blocks: list[int],
    size: int,
    rounds: int,
) -> Timed:
    """Once to warm up and then `rounds` times, each beside what the link gives then."""
    pairs = [(pull(blocks), limit()) for _ in range(rounds + 1)][1:]
    seconds = [pulled for pulled, _ in pairs]
    return Timed(
        statistics.median(seconds),
        max(seconds) / min(seconds),
        statistics.median(size / pulled / limit for pulled, limit in pairs),
    )


def blocks_of(tokens: int, *, scattered: bool) -> list[int]:
    """As they lie in the owner's memory: one after the other, or in random order."""
    blocks = list(range(tokens // BLOCK_TOKENS))
    if scattered:
        random.Random(tokens).shuffle(blocks)
    return blocks


@dataclass(frozen=True, slots=True)
class Hold:
    """An order to the owner's process: a prefill that has ended."""

    request_id: str
    finished: FinishedPrefill

    def __call__(self, holds: BlockLeases) -> None:
        holds.grant(self.request_id, self.finished)


class Puller:
    """Has prompts held by the other process, and pulls them."""

    def __init__(
        self, orders: Connection, owner: tuple[str, int], registered: RegisteredKv, way: Transport
    ) -> None:
        self._orders = orders
        self._owner = owner
        self._reader = KvClient(registered, [way], BOUND_S)
        self._epochs = itertools.count(1)

    def pull(self, blocks: list[int]) -> float:
        """Seconds from the question to the owner's last word."""
        epoch = next(self._epochs)
        request_id, digest = f"r{epoch}", compute_prompt_digest([epoch])
        self._orders.send(Hold(request_id, FinishedPrefill(epoch, digest, tuple(blocks))))
        self._orders.recv()
        hand_off = Handoff("boot-p", request_id, epoch, digest, 0, (self._owner,))
        begun = time.perf_counter()
        self._reader.pull(hand_off, digest, 0, sorted(blocks))
        return time.perf_counter() - begun


def own(orders: Connection, shape: Shape, num_blocks: int, place: Place) -> None:
    """The other process: executes commands on its holds, serves, and streams for the limit."""
    if place.prepare:
        place.prepare()
    torch.set_num_threads(1)
    registered = keep("boot-p", shape, num_blocks, place.owner_host)
    shared = share_memory(registered.memory)
    holds = BlockLeases(BOUND_S, BOUND_S)
    owner = KvServer(registered, holds, shared, 0, BOUND_S)
    with socket.create_server((place.owner_host, 0)) as listening:
        threading.Thread(target=stream, args=(listening,), daemon=True).start()
        orders.send((owner.port, shared, listening.getsockname()[1]))
        while True:
            order = orders.recv()
            if order is None:
                # Not before: its progress thread keeps a core busy.
                side = nixl_pull.Side(registered)
                orders.send(side.descriptor)
            else:
                orders.send(order(holds))


def stream(listening: socket.socket) -> None:
    """Send for the limit, each time that a byte comes."""
    connected, _ = listening.accept()
    block = memoryview(bytes(CHUNK_BYTES))
    with connected:
        while connected.recv(1):
            for _ in range(LIMIT_BYTES // CHUNK_BYTES):
                connected.sendall(block)


def keep(boot_id: str, shape: Shape, num_blocks: int, host: str) -> RegisteredKv:
    """KV of a shape, every page written once."""
    layers = [
        torch.ones(num_blocks, shape.block_bytes, dtype=torch.uint8)
        for _ in range(shape.num_layers)
    ]
    memory, planes = register_tensors(layers, num_blocks)
    sizes = (shape.num_layers, shape.num_kv_heads, shape.head_size)
    layout = KvLayout(shape.name, "bfloat16", BLOCK_TOKENS, *sizes, "benchmark")
    return RegisteredKv(boot_id, layout, memory, tuple(planes), host)


def copied(memory: Memory, shared: tuple[SharedRegion, ...]) -> float:
    """Bytes per second of plain copies out of the other process's memory, a layer at a time."""
    link = SharedMemoryLink(memory, shared)
    whole: list[RangeCopy] = []
    size = 0
    for number, region in enumerate(memory.regions):
        if size < LIMIT_BYTES:
            span = ByteRange(number, 0, region.numel())
            whole.append(RangeCopy(span, span))
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
        came = connected.recv_into(buffer, min(left, CHUNK_BYTES))
        assert came, "the owner's process has gone"
        left -= came
    return LIMIT_BYTES / (time.perf_counter() - begun)
