"""What is still to be waited for after a prompt: all of its KV, or the last chunk's or layer's.

Run from the root: `.venv/bin/python benchmarks/kv/overlap.py [--gbps 10 25]`. The owner computes a
prompt for a configured time per token, asleep, as a GPU leaves its host; the puller takes the KV
over a link of a configured rate (network_link.py) or out of shared memory. Visible is what passes
from the end of the computation to the owner's last word. Beside it is what the planner's model says
(perf), from the link's rate measured right after.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum

import torch
from network_link import Cable, laid, leave_own_network
from pair import BLOCK_TOKENS, BOUND_S, SHAPES, Hold, Pair, Shape, blocks_of, opened
from rich.console import Console
from rich.table import Table

from cleave.perf.hardware.kv_transfer import KvTransferModel
from cleave_worker.transfer.block_leases import BlockLeases, FinishedPrefill, PrefillInProgress
from cleave_worker.transfer.client import KvClient
from cleave_worker.transfer.handoff import Handoff, compute_prompt_digest
from cleave_worker.transfer.layerwise_client import LayerwiseClient
from cleave_worker.transfer.progress import Progress
from cleave_worker.transfer.transport import Transport

TOKENS = (512, 2_048, 8_192)


class Mode(StrEnum):
    """When KV is moved."""

    PULL = "after the prompt"
    CHUNK = "per chunk"
    LAYER = "per layer"


@dataclass(frozen=True, slots=True)
class Prefill:
    """An order to the owner's process: compute a prompt, and notify its followers."""

    name: str
    mode: Mode
    blocks: tuple[int, ...]
    chunk_blocks: int
    num_layers: int
    block_s: float
    """Computation of a block's tokens."""

    def __call__(self, holds: BlockLeases) -> float:
        """When it was through."""
        digest = compute_prompt_digest([])
        if self.mode is not Mode.PULL:
            holds.begin_prefill(
                self.name, PrefillInProgress(1, digest, len(self.blocks), self.name)
            )
        until = time.monotonic()
        for first in range(0, len(self.blocks), self.chunk_blocks):
            end = min(len(self.blocks), first + self.chunk_blocks)
            for layer in range(1, self.num_layers + 1):
                until += (end - first) * self.block_s / self.num_layers
                time.sleep(max(0.0, until - time.monotonic()))
                if self.mode is Mode.LAYER and layer < self.num_layers:
                    holds.update_progress(self.name, self.blocks[:end], Progress(first, end, layer))
            if self.mode is not Mode.PULL:
                holds.update_progress(self.name, self.blocks[:end], Progress(end, end, 0))
        over = time.monotonic()
        holds.grant(self.name, FinishedPrefill(1, digest, self.blocks))
        return over


@dataclass(frozen=True, slots=True)
class Line:
    """One row; milliseconds are medians over the rounds."""

    link: str
    shape: str
    tokens: int
    mode: str
    prompt_ms: float
    visible_ms: float
    predicted_ms: float


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gbps", type=float, nargs="+", default=[10, 25])
    parser.add_argument("--token-ms", type=float, default=0.2, help="computation of a token")
    parser.add_argument("--chunk", type=int, default=2_048, help="tokens of a chunk")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    leave_own_network()
    torch.set_num_threads(1)
    with laid() as cable:
        show([line for shape in SHAPES for line in measure(shape, cable, args)])


def measure(shape: Shape, cable: Cable, args: argparse.Namespace) -> Iterator[Line]:
    """All links, sizes and modes."""
    links = [(Transport.SHARED_MEMORY, 0.0), *((Transport.GLOO, gbps) for gbps in args.gbps)]
    with opened(shape, max(TOKENS) // BLOCK_TOKENS, cable.place) as pair:
        for way, gbps in links:
            link = f"{gbps:g} Gb/s" if gbps else way.value
            if gbps:
                cable.hold_to(gbps)
            with closing(Mover(pair, way, link)) as mover:
                for tokens in TOKENS:
                    yield from compare(mover, link, tokens, args)


def compare(mover: "Mover", link: str, tokens: int, args: argparse.Namespace) -> Iterator[Line]:
    """All modes, beside what is predicted from the link as it is now."""
    latency_ms = statistics.median(mover.first_byte_ms() for _ in range(args.rounds + 1))
    shape = mover.pair.shape
    for mode in Mode:
        visible_ms = statistics.median(
            mover.visible_ms(tokens, mode, args.chunk, args.token_ms) for _ in range(args.rounds)
        )
        token_ms = 1e3 * shape.kv_bytes(tokens) / tokens / mover.limit()
        model = KvTransferModel(latency_ms, token_ms, shape.num_layers, args.token_ms)
        yield Line(
            link,
            shape.name,
            tokens,
            mode,
            tokens * args.token_ms,
            visible_ms,
            predicted_ms(model, mode, tokens, args.chunk),
        )


def predicted_ms(model: KvTransferModel, mode: Mode, tokens: int, chunk: int) -> float:
    """What the planner reckons with."""
    match mode:
        case Mode.PULL:
            return model.compute_serialized_ms(tokens)
        case Mode.CHUNK:
            return model.compute_per_chunk_ms(tokens, chunk)
        case Mode.LAYER:
            return model.compute_per_layer_ms(tokens)


class Mover:
    """Takes prompts from the owner one way, in any mode."""

    def __init__(self, pair: Pair, way: Transport, link: str) -> None:
        self.pair = pair
        self.limit = pair.copied if way is Transport.SHARED_MEMORY else pair.streamed
        """Bytes per second of the link itself."""
        self._reader = KvClient(pair.registered, [way], BOUND_S)
        self._follower = LayerwiseClient(self._reader, BOUND_S)
        self._names = (f"{link}: {number}" for number in itertools.count())

    def visible_ms(self, tokens: int, mode: Mode, chunk: int, token_ms: float) -> float:
        """From the end of the computation to the owner's last word."""
        blocks = blocks_of(tokens, scattered=True)
        orders = self.pair.orders
        orders.send(
            Prefill(
                name := next(self._names),
                mode,
                tuple(blocks),
                chunk // BLOCK_TOKENS,
                self.pair.shape.num_layers,
                BLOCK_TOKENS * token_ms / 1e3,
            )
        )
        if mode is Mode.PULL:
            computed = orders.recv()
            self._pull(name, blocks)
            return 1e3 * (time.monotonic() - computed)
        hand_off = self._hand_off(name, 0)
        self._follower.pull(hand_off, hand_off.prompt_digest, 0, sorted(blocks))
        done = time.monotonic()
        computed = orders.recv()
        return 1e3 * (done - computed)

    def close(self) -> None:
        """Break the connections."""
        self._reader.close()

    def first_byte_ms(self) -> float:
        """A pull of one block: all that does not depend on size."""
        name = next(self._names)
        self.pair.orders.send(Hold(name, FinishedPrefill(1, compute_prompt_digest([]), (0,))))
        self.pair.orders.recv()
        begun = time.monotonic()
        self._pull(name, [0])
        return 1e3 * (time.monotonic() - begun)

    def _pull(self, name: str, blocks: Sequence[int]) -> None:
        hand_off = self._hand_off(name, 1)
        self._reader.pull(hand_off, hand_off.prompt_digest, 0, sorted(blocks))

    def _hand_off(self, name: str, epoch: int) -> Handoff:
        return Handoff("boot-p", name, epoch, compute_prompt_digest([]), 0, (self.pair.owner,))


def show(lines: list[Line]) -> None:
    """As a table."""
    columns = ("link", "KV of", "tokens", "moved", "prompt ms", "visible ms", "of prompt")
    table = Table(*columns, "predicted ms")
    for line in lines:
        table.add_row(
            line.link,
            line.shape,
            f"{line.tokens:,}",
            line.mode,
            f"{line.prompt_ms:,.0f}",
            f"{line.visible_ms:,.1f}",
            f"{line.visible_ms / line.prompt_ms:.1%}",
            f"{line.predicted_ms:,.1f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
