"""Copies of KV: kernels, their price for the model's thread, links between two processes, events.

Parts of one_gpu.py. Each function yields rows; on a machine without a GPU the same code runs on the
CPU with smaller sizes. What cannot be measured there is a row with the reason.
"""

import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import torch

from cleave_worker.transfer.block_leases import BlockLeases, FinishedPrefill
from cleave_worker.transfer.client import KvClient
from cleave_worker.transfer.copy_stream import record_event, select_copy_stream, wait_for_copies
from cleave_worker.transfer.handoff import Handoff, KvLayout, RefusedError
from cleave_worker.transfer.memory import (
    ByteRange,
    Memory,
    chunk_ranges,
    copy_rows,
    list_ranges,
    pack_ranges,
    register_tensors,
)
from cleave_worker.transfer.server import KvServer, RegisteredKv
from cleave_worker.transfer.transport import LinkError, Transport
from cleave_worker.transfer.transports.nixl_agent import NixlAgent, is_installed
from cleave_worker.transfer.transports.shared_memory import share_memory

BLOCK_TOKENS = 16
CHUNK_BYTES = 8 << 20
HOST = "127.0.0.1"
KEY = "key of the port for KV"
BOUND_S = 120.0
UCX_TLS = "cuda_copy,cuda_ipc,sm,self,tcp"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured: Llama-3.1-8B's KV on a GPU, a fraction of it on a CPU."""

    num_layers: int = 32
    kv_heads: int = 8
    tokens: int = 8_192
    rounds: int = 7
    register_bytes: int = 60 << 30
    matrix: int = 8_192
    prompts: tuple[int, ...] = (512, 2_048, 8_192, 32_768)

    @property
    def block_bytes(self) -> int:
        """One block of one layer: keys and values of 16 bits, heads of 128."""
        return 2 * 2 * BLOCK_TOKENS * self.kv_heads * 128

    @property
    def num_blocks(self) -> int:
        """Blocks of the longest prompt."""
        return self.tokens // BLOCK_TOKENS

    @property
    def kv_bytes(self) -> int:
        """KV of the longest prompt."""
        return self.num_layers * self.num_blocks * self.block_bytes


ON_GPU = Sizes()
ON_CPU = Sizes(4, 8, 1_024, 3, 64 << 20, 512, (128, 512))


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, or why there is none."""

    part: str
    what: str
    value: float | None = None
    unit: str = ""
    note: str = ""


class WrongBytesError(RuntimeError):
    """Other bytes arrived than were sent."""


def fill(sizes: Sizes, device: torch.device, seed: int) -> list[torch.Tensor]:
    """Random KV, one tensor for each layer; equal where sizes, seed and kind of device are."""
    shape = (sizes.num_blocks, sizes.block_bytes)
    if device.type == "meta":
        count = range(sizes.num_layers)
        return [torch.empty(shape, dtype=torch.uint8, device=device) for _ in count]
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(0, 255, shape, dtype=torch.uint8, generator=generator)
    return [first.to(device, copy=True) + layer for layer in range(sizes.num_layers)]


def scatter_blocks(sizes: Sizes) -> list[int]:
    """All blocks, in an order in which none follows its neighbour."""
    return [*range(0, sizes.num_blocks, 2), *range(1, sizes.num_blocks, 2)]


def time_ms(device: torch.device, rounds: int, do: Callable[[], object]) -> float:
    """Median until the device is through, after one round to warm up."""
    found = []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        do()
        wait_for_copies(device)
        found.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(found[1:])


class Prompt:
    """A prompt's scattered KV on a device, and a buffer for its pieces."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        layers = fill(sizes, device, 1)
        self.memory, regions = register_tensors(layers, sizes.num_blocks)
        self._packed = Memory([torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=device)])
        ranges = list_ranges(regions, scatter_blocks(sizes))
        self._groups = list(chunk_ranges(ranges, CHUNK_BYTES))

    def move_by_copies(self) -> None:
        """Gather and scatter by one copy for each block, as until 2026-11-25."""
        for target, source, pairs in self._iterate():
            for own, remote in pairs:
                target.view(own).copy_(source.view(remote))

    def move_by_kernels(self) -> None:
        """Gather and scatter as the connector does."""
        for target, source, pairs in self._iterate():
            copy_rows(target, source, pairs)

    def _iterate(self) -> Iterator[tuple[Memory, Memory, Iterator[tuple[ByteRange, ByteRange]]]]:
        for group in self._groups:
            places = pack_ranges(group)
            yield self._packed, self.memory, zip(places, group, strict=True)
            yield self.memory, self._packed, zip(group, places, strict=True)


def measure_gil(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Part a: gathering and scattering a prompt by one copy a block, and by one kernel a piece,
    while another thread replays the kernels of a pass. Tensors without memory ("meta") show the
    time in Python and torch alone, during which no other thread can launch a kernel."""
    prompt, hollow = Prompt(sizes, device), Prompt(ON_GPU, torch.device("meta"))
    expected = [region.clone() for region in prompt.memory.regions]
    run_pass = build_pass(device, sizes)
    alone_ms = time_passes(device, run_pass, lambda: time.sleep(0.2))
    yield Row("a", "a pass of the model, alone", alone_ms[0], "ms", f"p99 {alone_ms[1]:.2f} ms")
    for name, do, launch in (
        ("one copy a block", prompt.move_by_copies, hollow.move_by_copies),
        ("one kernel a piece", prompt.move_by_kernels, hollow.move_by_kernels),
    ):
        launch()
        begun = time.thread_time()
        launch()
        launch_ms = 1e3 * (time.thread_time() - begun)
        note = f"{ON_GPU.tokens:,} tokens, 32 layers, both ways"
        yield Row("a", f"host time, {name}", launch_ms, "ms", note)
        ms = time_ms(device, sizes.rounds, do)
        rate = 2 * sizes.kv_bytes / ms / 1e6
        yield Row("a", f"gather and scatter, {name}", rate, "GB/s", f"{sizes.tokens:,} tokens")
        median, p99 = time_passes(device, run_pass, do)
        slower = f"p99 {p99:.2f} ms; alone {alone_ms[0]:.2f}, {alone_ms[1]:.2f}"
        yield Row("a", f"a pass of the model, beside {name}", median, "ms", slower)
    if not all(map(torch.equal, prompt.memory.regions, expected)):
        raise WrongBytesError("gathering and scattering changed the KV")


def build_pass(device: torch.device, sizes: Sizes) -> Callable[[], None]:
    """A pass of small products, replayed as a CUDA graph where there is a GPU."""
    side = 1_024 if device.type == "cuda" else 64
    weights = torch.randn(side, side, device=device)
    state = torch.randn(8, side, device=device)

    def run() -> None:
        hidden = state
        for _ in range(sizes.num_layers):
            hidden = hidden @ weights

    if device.type != "cuda":
        return run
    run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay() -> None:
        # What an engine does in Python between two passes.
        sum(range(2_000))
        graph.replay()
        torch.cuda.current_stream(device).synchronize()

    return replay


def time_passes(
    device: torch.device, run_pass: Callable[[], None], do: Callable[[], object]
) -> tuple[float, float]:
    """Median and 99th percentile of a pass in ms while another thread does something once."""
    ended = threading.Event()

    def copy() -> None:
        select_copy_stream(device)
        try:
            do()
            wait_for_copies(device)
        finally:
            ended.set()

    thread = threading.Thread(target=copy)
    thread.start()
    found = []
    while not ended.is_set() or len(found) < 10:
        begun = time.perf_counter()
        run_pass()
        found.append(1e3 * (time.perf_counter() - begun))
    thread.join(BOUND_S)
    return statistics.median(found), sorted(found)[int(0.99 * len(found))]


def measure_links(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Parts b and d: a prompt from another process over each transport, as the connector pulls it.

    NIXL is CUDA IPC between processes of one GPU; without a network card UCX needs TCP for its own
    messages, so `UCX_TLS` names it here. gloo is what pods without RDMA get: a copy to the
    host, TCP, a copy from the host.
    """
    os.environ.setdefault("UCX_TLS", UCX_TLS if device.type == "cuda" else "tcp")
    ways = [("b", Transport.NIXL)] if is_installed() else []
    if device.type == "cpu":
        ways.append(("b", Transport.SHARED_MEMORY))
    for part, way in (*ways, ("d", Transport.GLOO)):
        yield from measure_link(part, way, [device, device], sizes)
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        two = [torch.device("cuda", index) for index in (0, 1)]
        yield from measure_link("b", Transport.NCCL, two, sizes)
    else:
        yield Row("b", "nccl", note="not run: NCCL needs two GPUs, and refuses two ranks on one")


def measure_link(
    part: str, way: Transport, devices: Sequence[torch.device], sizes: Sizes
) -> Iterator[Row]:
    """Pull one block, then the whole prompt in rounds; compare all bytes at the end."""
    spawn = multiprocessing.get_context("spawn")
    orders, child_end = spawn.Pipe()
    process = spawn.Process(target=own_kv, args=(child_end, str(devices[0]), sizes), daemon=True)
    process.start()
    child_end.close()
    client = None
    try:
        if not orders.poll(BOUND_S):
            raise RuntimeError("the process that has the KV does not start")
        port = orders.recv()
        select_copy_stream(devices[1])
        ours = fill(sizes, devices[1], 2)
        client = KvClient(build_kv("boot-d", ours, sizes), (way,), BOUND_S)
        blocks = scatter_blocks(sizes)
        found = []
        for count in (1, 1, *([sizes.num_blocks] * sizes.rounds)):
            orders.send(tuple(blocks[:count]))
            handoff = Handoff("boot-p", orders.recv(), 1, "d", count, ((HOST, port),), key=KEY)
            begun = time.perf_counter()
            client.pull(handoff, "d", 0, blocks[:count])
            found.append(time.perf_counter() - begun)
        theirs = fill(sizes, devices[1], 1)
        if not all(map(torch.equal, ours, theirs)):
            raise WrongBytesError(f"{way}: other bytes arrived than were sent")
        rate = sizes.kv_bytes / statistics.median(found[2:]) / 1e9
        yield Row(part, f"{way}: connect and pull one block", 1e3 * found[0], "ms")
        yield Row(part, f"{way}: pull one block", 1e3 * found[1], "ms")
        note = f"{sizes.tokens:,} tokens, scattered; bytes compared"
        yield Row(part, f"{way}: pull a prompt", rate, "GB/s", note)
    except (RefusedError, LinkError) as error:
        yield Row(part, f"{way}", note=f"does not work here: {error}")
    finally:
        if client:
            client.close()
        process.kill()
        process.join(BOUND_S)


def own_kv(orders: Connection, device_name: str, sizes: Sizes) -> None:
    """The process that has the KV: leases what it is sent, until the pipe closes."""
    device = torch.device(device_name)
    torch.set_num_threads(1)
    select_copy_stream(device)
    kv = build_kv("boot-p", fill(sizes, device, 1), sizes)
    shared = share_memory(kv.memory)
    leases = BlockLeases(BOUND_S, BOUND_S)
    server = KvServer(kv, leases, shared, 0, BOUND_S)
    orders.send(server.port)
    number = 0
    while True:
        try:
            blocks = orders.recv()
        except EOFError:
            return
        number += 1
        leases.grant(f"r{number}", FinishedPrefill(1, "d", blocks))
        orders.send(f"r{number}")


def build_kv(boot_id: str, layers: list[torch.Tensor], sizes: Sizes) -> RegisteredKv:
    """KV as an engine registers it."""
    memory, regions = register_tensors(layers, sizes.num_blocks)
    layout = KvLayout("bench", "uint8", BLOCK_TOKENS, sizes.num_layers, sizes.kv_heads, 128, "")
    return RegisteredKv(boot_id, layout, memory, tuple(regions), HOST, key=KEY)


def measure_events(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Part c: processor time of a thread that waits for a GPU, asleep and awake."""
    if device.type != "cuda":
        yield Row("c", "waiting for an event", note="not run: events need a GPU")
        return
    for name, event_of in (
        ("asleep (blocking=True)", partial(record_event, device)),
        ("awake (torch's default)", partial(record_spinning, device)),
    ):
        torch.cuda._sleep(2_000_000_000)
        event = event_of()
        begun, used = time.perf_counter(), time.thread_time()
        event.synchronize()
        waited = time.perf_counter() - begun
        used = time.thread_time() - used
        yield Row("c", f"waiting, {name}", used / waited, "cores", f"for {waited:.2f} s")
    yield from measure_overlap(device, sizes)


def record_spinning(device: torch.device) -> torch.cuda.Event:
    """An event whose wait keeps a core busy."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def measure_overlap(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Copies to pinned memory, alone and while the GPU multiplies."""
    source = torch.ones(1 << 30, dtype=torch.uint8, device=device)
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    matrix = torch.randn(sizes.matrix, sizes.matrix, dtype=torch.bfloat16, device=device)
    copies = torch.cuda.Stream(device)

    def copy() -> None:
        with torch.cuda.stream(copies):
            host.copy_(source, non_blocking=True)
        torch.cuda.current_stream(device).wait_stream(copies)

    def multiply() -> None:
        for _ in range(20):
            torch.mm(matrix, matrix)

    def both() -> None:
        with torch.cuda.stream(copies):
            host.copy_(source, non_blocking=True)
        multiply()
        torch.cuda.current_stream(device).wait_stream(copies)

    found = [time_ms(device, sizes.rounds, do) for do in (copy, multiply, both)]
    yield Row("d", "copy to pinned host memory", host.numel() / found[0] / 1e6, "GB/s")
    hidden = (found[0] + found[1] - found[2]) / min(found[:2])
    yield Row("d", "share of that copy hidden behind products", 100 * hidden, "%")


def measure_registration(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Part f: what registering KV with NIXL takes of the GPU, and how long."""
    if not is_installed():
        yield Row("f", "registration with NIXL", note="not run: NIXL is not installed")
        return
    os.environ.setdefault("UCX_TLS", UCX_TLS if device.type == "cuda" else "tcp")
    size = sizes.register_bytes
    if device.type == "cuda":
        size = min(size, int(0.8 * torch.cuda.mem_get_info(device)[0]))
    memory = Memory([torch.zeros(size, dtype=torch.uint8, device=device)])
    before = get_free_bytes(device)
    begun = time.perf_counter()
    try:
        NixlAgent("one-gpu", device, use_progress_thread=False).register(memory)
    except LinkError as error:
        yield Row("f", "registration with NIXL", note=f"does not work here: {error}")
        return
    note = f"{size / 2**30:.2f} GiB registered"
    yield Row("f", "registration with NIXL", time.perf_counter() - begun, "s", note)
    if before is not None:
        taken = (before - (get_free_bytes(device) or 0)) / 2**20
        yield Row("f", "GPU memory that registration takes", taken, "MiB")


def get_free_bytes(device: torch.device) -> int | None:
    """Free memory of a GPU; None on the host, where other processes change it."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else None
