"""A KV server in a separate process, controlled through a pipe.

The processes are forked from one that has imported torch, which takes three seconds.
"""

import multiprocessing
import os
from multiprocessing.connection import Connection
from typing import Any

import torch

from cleave_worker.transfer import server as owner_module
from cleave_worker.transfer.block_leases import BlockLeases, FinishedPrefill, PrefillInProgress
from cleave_worker.transfer.handoff import Handoff, KvLayout, compute_prompt_digest
from cleave_worker.transfer.memory import register_tensors
from cleave_worker.transfer.server import KvServer, RegisteredKv
from cleave_worker.transfer.sharding import ParallelShape, ShardSpec
from cleave_worker.transfer.transports import cuda_ipc
from cleave_worker.transfer.transports.shared_memory import share_memory

from tests.support.mapping_calls import FakeMappingCalls, find_fake_calls, refuse_export

BLOCKS, LAYERS = 16, 3
LAYOUT = KvLayout("tiny@main", "float32", 16, LAYERS, 2, 32, "LBHNC")
ALONE = ParallelShape()
KEY = "key of the producer's KV port"
_FORK_SERVER = multiprocessing.get_context("forkserver")
_FORK_SERVER.set_forkserver_preload([__name__])


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
    boot_id: str,
    tensors: list[torch.Tensor],
    shape: ParallelShape = ALONE,
    rank: int = 0,
    key: str = "",
) -> RegisteredKv:
    memory, planes = register_tensors(tensors, BLOCKS)
    share_of = ShardSpec(shape, rank)
    return RegisteredKv(boot_id, LAYOUT, memory, tuple(planes), "127.0.0.1", share_of, key)


class OwnerProcess:
    """One server process; `command` sends a command and waits for the response."""

    def __init__(self, **settings: object) -> None:
        self.boot_id = str(settings.setdefault("boot_id", "boot-p"))
        self.key = str(settings.setdefault("key", KEY))
        self._connection, others_end = multiprocessing.Pipe()
        # The environment is that of the test, not that of the first one.
        arguments = (others_end, settings, dict(os.environ))
        self.process = _FORK_SERVER.Process(target=serve, args=arguments)
        self.process.start()
        others_end.close()
        self.port = self._connection.recv()["port"]

    def command(self, do: str, **order: object) -> dict[str, Any]:
        self._connection.send({"do": do, **order})
        return {} if do == "die" else self._connection.recv()

    def hold(
        self, request_id: str, tokens: list[int], blocks: list[int], epoch: int = 1
    ) -> Handoff:
        """Register the finished prefill of a prompt; return its handoff."""
        digest = compute_prompt_digest(tokens)
        self.command("hold", id=request_id, epoch=epoch, digest=digest, blocks=blocks)
        address = (("127.0.0.1", self.port),)
        return Handoff(self.boot_id, request_id, epoch, digest, len(tokens), address, key=self.key)

    def end(self) -> None:
        self.process.kill()
        self.process.join(60)
        self._connection.close()


def serve(
    connection: "Connection[dict[str, Any], dict[str, Any]]",
    settings: dict[str, Any],
    environment: dict[str, str],
) -> None:
    """Follow commands until the other end of the connection is closed."""
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    owner_module._PREFILL_WAIT_S = 0.5
    cuda_ipc.find_calls = find_fake_calls
    if not settings.get("can_export", True):
        FakeMappingCalls.export = refuse_export
    shape, rank = settings.get("shape", ALONE), settings.get("rank", 0)
    tensors = caches(1000, shape, rank)
    registered = register_kv(settings["boot_id"], tensors, shape, rank, settings["key"])
    shared = share_memory(registered.memory) if settings.get("shared", True) else ()
    leases = BlockLeases(settings.get("lease_s", 60.0), settings.get("reading_s", 60.0))
    owner = KvServer(registered, leases, shared, 0, settings.get("transfer_s", 30.0))
    connection.send({"port": owner.port})
    while True:
        try:
            order = connection.recv()
        except EOFError:
            return
        answer: dict[str, Any] = {}
        match order["do"]:
            case "hold":
                blocks = tuple(order["blocks"])
                leases.grant(order["id"], FinishedPrefill(order["epoch"], order["digest"], blocks))
            case "begin":
                begun = PrefillInProgress(1, order["digest"], order["num_blocks"], order["name"])
                leases.begin_prefill(order["id"], begun)
            case "freed":
                answer = {"freed": sorted(leases.take_freed()), "held": leases.num_leased}
            case "overwrite":
                for layer in tensors:
                    layer[order["block"]] = -1
            case "die":
                os._exit(9)
        connection.send(answer)
