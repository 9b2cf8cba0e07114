"""How fast KV moves between two engines of this machine, beside what the link itself gives.

Run from the root: `.venv/bin/python benchmarks/kv/run.py [--gib 3]`. Two processes hold KV of the
shape of a real model; one pulls prompts of 512 to 32,768 tokens from the other, as the KV connector
does. NIXL, where it is installed, reads the same blocks. shaped.py does it over a slower link.
"""

import argparse
import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from pair import (
    BLOCK_TOKENS,
    NIXL,
    OVER_NIXL,
    SHAPES,
    Place,
    Shape,
    blocks_of,
    nixl_pull,
    opened,
    timed,
)
from rich.console import Console
from rich.table import Table

from cleave_worker.transfer.transport import Transport

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Line:
    """One row."""

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
    parser.add_argument("--tcp", action="store_true", help="have NIXL take TCP, as between hosts")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.tcp:
        os.environ["UCX_TLS"] = "tcp"
    torch.set_num_threads(1)
    lines = [
        line
        for shape in SHAPES
        for line in measure(shape, int(args.gib * 2**30), args.rounds, over_tcp=args.tcp)
    ]
    if args.json:
        print(json.dumps([asdict(line) for line in lines], indent=1))
    else:
        show(lines)


def measure(shape: Shape, room: int, rounds: int, *, over_tcp: bool) -> Iterator[Line]:
    """All sizes of a shape that fit."""
    sizes = shape.sizes(room)
    with opened(shape, max(sizes) // BLOCK_TOKENS, Place(HOST, HOST)) as pair:
        limits: dict[str, Callable[[], float]] = {
            Transport.SHARED_MEMORY: pair.copied,
            Transport.GLOO: pair.streamed,
        }
        if nixl_pull:
            limits |= dict.fromkeys((OVER_NIXL, NIXL), pair.streamed if over_tcp else pair.copied)
        for way, limit in limits.items():
            pull = pair.puller(way)
            for tokens, scattered in itertools.product(sizes, (False, True)):
                size = shape.kv_bytes(tokens)
                found = timed(pull, limit, blocks_of(tokens, scattered=scattered), size, rounds)
                yield Line(
                    way,
                    shape.name,
                    tokens,
                    "scattered" if scattered else "in one piece",
                    size / 2**20,
                    1e3 * found.seconds,
                    found.gb_per_s(size),
                    found.spread,
                    found.of_limit,
                )


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
