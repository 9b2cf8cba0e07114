"""A KV server in a separate process, controlled by JSON lines on stdin; it responds on stdout."""

import json
import os
import subprocess
import sys
from typing import Any

import msgspec
import torch

from cleave_worker.transfer import server as owner_module
from cleave_worker.transfer.block_leases import BlockLeases, FinishedPrefill, PrefillInProgress
from cleave_worker.transfer.handoff import Handoff, KvLayout, compute_prompt_digest
from cleave_worker.transfer.memory import register_tensors
from cleave_worker.transfer.server import KvServer, RegisteredKv
from cleave_worker.transfer.sharding import ParallelShape, ShardSpec
from cleave_worker.transfer.transports.shared_memory import share_memory

BLOCKS, LAYERS = 16, 3
LAYOUT = KvLayout("tiny@main", "float32", 16, LAYERS, 2, 32, "LBHNC")
ALONE = ParallelShape()


def caches(fill: int, shape: ParallelShape = ALONE, rank: int = 0) -> list[torch.Tensor]:
    """A rank's KV, with values that encode engine (`fill`), layer, block and head."""
    heads = shape.get_head_range(rank, LAYOUT.num_kv_heads)
    layers = [number for number in range(LAYERS) if number in shape.get_layer_range(rank)]
    tensors = [torch.empty(BLOCKS, len(heads), 16, 64) for _ in layers]
    for number, tensor in zip(layers, tensors, strict=True):
        for block in range(BLOCKS):
            for at, head in enumerate(heads):
                tensor[block, at] = fill + number * 100 + block + head / 2
    return tensors


def register_kv(
    boot_id: str, tensors: list[torch.Tensor], shape: ParallelShape = ALONE, rank: int = 0
) -> RegisteredKv:
    memory, planes = register_tensors(tensors, BLOCKS)
    share_of = ShardSpec(shape, rank)
    return RegisteredKv(boot_id, LAYOUT, memory, tuple(planes), "127.0.0.1", share_of)


class OwnerProcess:
    """One server process; `command` sends a command and waits for the response."""

    def __init__(self, **settings: object) -> None:
        self.boot_id = str(settings.setdefault("boot_id", "boot-p"))
        self.process = subprocess.Popen(
            [sys.executable, __file__, msgspec.json.encode(settings).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port = self._answer()["port"]

    def command(self, do: str, **order: object) -> dict[str, Any]:
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"do": do, **order}) + "\n")
        self.process.stdin.flush()
        return {} if do == "die" else self._answer()

    def hold(
        self, request_id: str, tokens: list[int], blocks: list[int], epoch: int = 1
    ) -> Handoff:
        """Register the finished prefill of a prompt; return its handoff."""
        digest = compute_prompt_digest(tokens)
        self.command("hold", id=request_id, epoch=epoch, digest=digest, blocks=blocks)
        return Handoff(
            self.boot_id, request_id, epoch, digest, len(tokens), (("127.0.0.1", self.port),)
        )

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    owner_module._PREFILL_WAIT_S = 0.5
    shape, rank = msgspec.convert(settings.get("shape", {}), ParallelShape), settings.get("rank", 0)
    tensors = caches(1000, shape, rank)
    registered = register_kv(settings["boot_id"], tensors, shape, rank)
    shared = share_memory(registered.memory) if settings.get("shared", True) else ()
    leases = BlockLeases(settings.get("lease_s", 60.0), settings.get("reading_s", 60.0))
    owner = KvServer(registered, leases, shared, 0, settings.get("transfer_s", 30.0))
    say({"port": owner.port})
    for line in sys.stdin:
        order = json.loads(line)
        match order["do"]:
            case "hold":
                blocks = tuple(order["blocks"])
                leases.grant(order["id"], FinishedPrefill(order["epoch"], order["digest"], blocks))
                say({})
            case "begin":
                begun = PrefillInProgress(1, order["digest"], order["num_blocks"], order["name"])
                leases.begin_prefill(order["id"], begun)
                say({})
            case "freed":
                say({"freed": sorted(leases.take_freed()), "held": leases.num_leased})
            case "overwrite":
                for layer in tensors:
                    layer[order["block"]] = -1
                say({})
            case "die":
                os._exit(9)


def say(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
