"""How fast KV moves over a link of a configured rate, beside what that link itself gives.

Run from the root: `.venv/bin/python benchmarks/kv/limited_bandwidth.py [--gbps 1 10 25]`. The
owner's process gets a network of its own; a pair of virtual cards joins the two and the kernel's
token bucket (tbf) holds each to the rate. As root or, where allowed, in a user namespace. What went
over the card is counted by the kernel, so that a way that takes another road is found out.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from network_link import Cable, crossed, laid, leave_own_network
from pair import (
    BLOCK_TOKENS,
    NIXL,
    OVER_NIXL,
    SHAPES,
    Pair,
    Shape,
    blocks_of,
    nixl_pull,
    opened,
    timed,
)
from rich.console import Console
from rich.table import Table

from cleave_worker.transfer.transport import Transport


@dataclass(frozen=True, slots=True)
class Line:
    """One row."""

    gbps: float
    way: str
    shape: str
    tokens: int
    mib: float
    ms: float
    gb_per_s: float
    spread: float
    of_limit: float
    of_stated: float
    sent_per_kv: float
    """Bytes over the card for each byte of KV, what the puller sends back included."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gbps", type=float, nargs="+", default=[1, 10, 25])
    parser.add_argument("--rtt-ms", type=float, default=0, help="of the link; 0: what it has")
    parser.add_argument("--gib", type=float, default=2.6, help="most KV on each side")
    parser.add_argument("--longest", type=float, default=5, help="no pull of more seconds")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    leave_own_network()
    torch.set_num_threads(1)
    with laid(args.rtt_ms) as cable:
        lines = [line for shape in SHAPES for line in measure(shape, cable, args)]
    if args.json:
        print(json.dumps([asdict(line) for line in lines], indent=1))
    else:
        show(lines)


def measure(shape: Shape, cable: Cable, args: argparse.Namespace) -> Iterator[Line]:
    """All ways, rates and sizes of a shape: those that fit, and that the link moves in time."""
    room = int(args.gib * 2**30)
    with opened(shape, max(shape.sizes(room)) // BLOCK_TOKENS, cable.place) as pair:
        for way in [Transport.GLOO.value] + ([OVER_NIXL, NIXL] if nixl_pull else []):
            pull = Counted(pair, way)
            for gbps in args.gbps:
                cable.hold_to(gbps)
                for tokens in shape.sizes(min(room, int(args.longest * gbps * 1e9 / 8))):
                    yield line(gbps, way, pair, pull, tokens, args.rounds)


def line(gbps: float, way: str, pair: Pair, pull: "Counted", tokens: int, rounds: int) -> Line:
    """One size over the link as it is shaped now."""
    size = pair.shape.kv_bytes(tokens)
    pull.sent = 0
    found = timed(pull, pair.streamed, blocks_of(tokens, scattered=True), size, rounds)
    return Line(
        gbps,
        way,
        pair.shape.name,
        tokens,
        size / 2**20,
        1e3 * found.seconds,
        found.gb_per_s(size),
        found.spread,
        found.of_limit,
        found.gb_per_s(size) / (gbps / 8),
        pull.sent / size / (rounds + 1),
    )


class Counted:
    """A pull, with the bytes that crossed the card meanwhile."""

    def __init__(self, pair: Pair, way: str) -> None:
        self._pull = pair.puller(way)
        self.sent = 0

    def __call__(self, blocks: list[int]) -> float:
        before = crossed()
        seconds = self._pull(blocks)
        self.sent += crossed() - before
        return seconds


def show(lines: list[Line]) -> None:
    """As a table."""
    columns = ("Gb/s", "way", "KV of", "tokens", "MiB", "ms", "GB/s", "spread", "of limit")
    table = Table(*columns, "of rate", "sent/KV")
    for line in lines:
        table.add_row(
            f"{line.gbps:g}",
            line.way,
            line.shape,
            f"{line.tokens:,}",
            f"{line.mib:,.0f}",
            f"{line.ms:,.1f}",
            f"{line.gb_per_s:.3f}",
            f"{line.spread:.2f}",
            f"{line.of_limit:.0%}",
            f"{line.of_stated:.0%}",
            f"{line.sent_per_kv:.4f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
