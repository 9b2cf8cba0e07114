"""What a machine's GPUs give KV on its way: one command, to be run where there are any.

Run from the root: `.venv/bin/python benchmarks/kv/gpu.py`. Gathering blocks out of KV and putting
them back, as the connector does, beside a plain copy in device memory; copies to the host while the
GPU computes; with two GPUs a pair of processes over NCCL, beside a plain copy between the two.
Bytes are compared; exit code 1: other bytes came than were sent, 2: there is no GPU.
"""

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import torch
from pair import BLOCK_TOKENS, BOUND_S, SHAPES, Shape, blocks_of
from rich.console import Console
from rich.table import Table

from cleave_worker.transfer.memory import (
    ByteRange,
    LayerRegion,
    Memory,
    list_ranges,
    register_tensors,
)
from cleave_worker.transfer.transport import Transport
from cleave_worker.transfer.transports import torch_distributed

HOST = "127.0.0.1"
ROUNDS = 7
LIMIT_BYTES = 1 << 30
MATRIX = 8_192
PRODUCTS = 20
TOKENS = (512, 2_048, 8_192)


@dataclass(frozen=True, slots=True)
class Line:
    """One row."""

    what: str
    ms: float
    num_bytes: int
    of_limit: float | None = None
    note: str = ""


def main() -> None:
    """Print what was measured, or say why nothing can be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu.py: torch sees no GPU here; run it on a machine that has one", file=sys.stderr)
        sys.exit(2)
    device = torch.device("cuda", 0)
    print(
        f"{torch.cuda.get_device_name(device)} x {torch.cuda.device_count()}, {torch.__version__}"
    )
    lines = [*gathered(device), *beside_products(device)]
    if torch.cuda.device_count() > 1:
        lines += between(Transport.NCCL, [torch.device("cuda", number) for number in (0, 1)])
    else:
        print("One GPU: NCCL between two is left out.")
    show(lines)


def gathered(device: torch.device) -> Iterator[Line]:
    """Blocks of prompts, packed for a link and unpacked again."""
    one = torch.ones(LIMIT_BYTES, dtype=torch.uint8, device=device)
    other = torch.empty_like(one)
    limit_ms = timed_ms(device, lambda: other.copy_(one))
    yield Line("copy in device memory", limit_ms, LIMIT_BYTES, note="the limit: one large copy")
    limit = LIMIT_BYTES / limit_ms
    for shape in SHAPES:
        memory, planes, layers = filled(shape, max(TOKENS), device)
        for tokens in TOKENS:
            size = shape.kv_bytes(tokens)
            packed = Memory([one[:size]])
            for scattered in (False, True):
                blocks = blocks_of(tokens, scattered=scattered)
                spans = list(list_ranges(planes, blocks))
                where = places(spans)
                expected = [layer[blocks] for layer in layers]
                label = f"{shape.name}, {tokens:,}, {'scattered' if scattered else 'in one piece'}"
                steps = (
                    ("gather", packed, memory, list(zip(where, spans, strict=True))),
                    ("scatter", memory, packed, list(zip(spans, where, strict=True))),
                )
                for what, target, source, pairs in steps:
                    ms = timed_ms(device, partial(target.copy_from, source, pairs))
                    note = f"{len(pairs):,} copies"
                    yield Line(f"{what}: {label}", ms, size, size / ms / limit, note)
                    if target is packed:
                        for layer in layers:
                            layer[blocks] = 0
                compare(layers, blocks, expected)
            index = torch.tensor(blocks, device=device)
            ms = timed_ms(device, partial(pick, layers, index))
            label = f"{shape.name}, {tokens:,}, scattered"
            yield Line(f"gather by index: {label}", ms, size, size / ms / limit, "a kernel a layer")


def beside_products(device: torch.device) -> Iterator[Line]:
    """Copies to the host on a stream of their own, alone and while the GPU multiplies."""
    source = torch.ones(LIMIT_BYTES, dtype=torch.uint8, device=device)
    host = torch.empty(LIMIT_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    matrix = torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16, device=device)
    aside = torch.cuda.Stream(device)

    def copy() -> None:
        with torch.cuda.stream(aside):
            host.copy_(source, non_blocking=True)

    def multiply() -> None:
        for _ in range(PRODUCTS):
            torch.mm(matrix, matrix)

    def both() -> None:
        copy()
        multiply()

    copy_ms, multiply_ms = timed_ms(device, copy), timed_ms(device, multiply)
    yield Line("copy to pinned host memory", copy_ms, LIMIT_BYTES, note="the limit of this way")
    back_ms = timed_ms(device, lambda: source.copy_(host, non_blocking=True))
    yield Line("copy from pinned host memory", back_ms, LIMIT_BYTES)
    both_ms = timed_ms(device, both)
    hidden = (copy_ms + multiply_ms - both_ms) / min(copy_ms, multiply_ms)
    yield Line(
        "the same copy while the GPU multiplies",
        both_ms,
        LIMIT_BYTES,
        note=f"products alone {multiply_ms:.1f} ms; {hidden:.0%} of the shorter is hidden",
    )


def between(way: Transport, devices: list[torch.device]) -> list[Line]:
    """Prompts from one process's device to another's, one link for all."""
    spawn = multiprocessing.get_context("spawn")
    here, child_end = spawn.Pipe()
    process = spawn.Process(target=give, args=(child_end, way, devices[0]), daemon=True)
    process.start()
    child_end.close()
    try:
        return list(run_puller(here, way, devices))
    finally:
        process.kill()
        process.join(BOUND_S)


def run_puller(orders: Connection, way: Transport, devices: list[torch.device]) -> Iterator[Line]:
    """The receiving end."""
    device = devices[1]
    use(device)
    one = torch.ones(LIMIT_BYTES, dtype=torch.uint8, device=devices[0])
    other = torch.empty(LIMIT_BYTES, dtype=torch.uint8, device=device)
    limit_ms = timed_ms(device, lambda: other.copy_(one))
    yield Line("copy between the two GPUs", limit_ms, LIMIT_BYTES, note="the limit: one large copy")
    for shape in SHAPES:
        memory, planes, layers = filled(shape, max(TOKENS), device, seed=2)
        orders.send(shape)
        assert orders.poll(BOUND_S), "the other process says nothing"
        link = torch_distributed.join_rendezvous(memory, way, (HOST, orders.recv()), HOST, BOUND_S)
        for tokens in TOKENS:
            size, blocks = shape.kv_bytes(tokens), blocks_of(tokens, scattered=True)
            ms = timed_ms(device, partial(take, orders, link, planes, tokens))
            sent = filled(shape, max(TOKENS), device)[2]
            compare(layers, blocks, [layer[blocks] for layer in sent])
            label = f"{way}: {shape.name}, {tokens:,}, scattered"
            yield Line(label, ms, size, size / ms / (LIMIT_BYTES / limit_ms))
        orders.send(None)
        link.close()


def take(
    orders: Connection,
    link: torch_distributed.ProcessGroupLink,
    planes: list[LayerRegion],
    tokens: int,
) -> None:
    """Have a prompt sent, and receive it."""
    orders.send(tokens)
    link.receive(list_ranges(planes, blocks_of(tokens, scattered=True)), BOUND_S)


def give(orders: Connection, way: Transport, device: torch.device) -> None:
    """The sending process: a link for each shape, a prompt for each number of tokens."""
    use(device)
    while True:
        shape: Shape = orders.recv()
        memory, planes, _ = filled(shape, max(TOKENS), device)
        meeting = torch_distributed.Rendezvous(HOST, BOUND_S)
        orders.send(meeting.port)
        link = meeting.create_link(memory, way, HOST, BOUND_S)
        while (tokens := orders.recv()) is not None:
            link.send(list_ranges(planes, blocks_of(tokens, scattered=True)), BOUND_S)
        link.close()


def filled(
    shape: Shape, tokens: int, device: torch.device, seed: int = 1
) -> tuple[Memory, list[LayerRegion], list[torch.Tensor]]:
    """Random KV with room for so many tokens: equal where shape, seed and device are."""
    num_blocks = tokens // BLOCK_TOKENS
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(
        0, 255, (num_blocks, shape.block_bytes), dtype=torch.uint8, generator=generator
    )
    layers = [numbers.to(device, copy=True) + number for number in range(shape.num_layers)]
    memory, planes = register_tensors(layers, num_blocks)
    return memory, planes, layers


def pick(layers: list[torch.Tensor], index: torch.Tensor) -> list[torch.Tensor]:
    """Blocks of each layer, by one kernel."""
    return [layer[index] for layer in layers]


def places(spans: list[ByteRange]) -> list[ByteRange]:
    """One after the other in a buffer."""
    found, at = [], 0
    for span in spans:
        found.append(ByteRange(0, at, span.length))
        at += span.length
    return found


def compare(layers: list[torch.Tensor], blocks: list[int], expected: list[torch.Tensor]) -> None:
    """End the program unless the blocks hold what they should."""
    for number, (layer, expected_layer) in enumerate(zip(layers, expected, strict=True)):
        if not torch.equal(layer[blocks], expected_layer):
            print(f"gpu.py: layer {number} has other bytes than were sent", file=sys.stderr)
            sys.exit(1)


def use(device: torch.device) -> None:
    """What NCCL and events take for this process's device."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def timed_ms(device: torch.device, do: Callable[[], object]) -> float:
    """Median over the rounds until the device is through; the first is for warming up."""
    found = []
    for _ in range(ROUNDS + 1):
        begun = time.perf_counter()
        do()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(found[1:])


def show(lines: list[Line]) -> None:
    """As a table."""
    table = Table("what", "MiB", "ms", "GB/s", "of limit", "")
    for line in lines:
        table.add_row(
            line.what,
            f"{line.num_bytes / 2**20:,.0f}",
            f"{line.ms:.2f}",
            f"{line.num_bytes / line.ms / 1e6:,.1f}",
            "" if line.of_limit is None else f"{line.of_limit:.0%}",
            line.note,
        )
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
