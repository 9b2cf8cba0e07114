"""KV of another process by CUDA IPC, as the connector pulls it, and the death of its owner.

Part g of one_gpu.py. The owner sees its GPU only, as the engines of a cell do. With one GPU both
have the same; on a CPU the same runs over shared memory.
"""

import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch
from copies import (
    BOUND_S,
    HOST,
    KEY,
    Row,
    Sizes,
    WrongBytesError,
    build_kv,
    fill,
    get_free_bytes,
    own_kv,
    scatter_blocks,
)

from cleave_worker.transfer.client import KvClient
from cleave_worker.transfer.copy_stream import select_copy_stream
from cleave_worker.transfer.handoff import Handoff, RefusedError
from cleave_worker.transfer.transport import Transport

PROMPTS = (512, 2_048, 8_192)
VISIBLE = "CUDA_VISIBLE_DEVICES"


def measure_mapped(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Pull prompts from an owner on the same GPU, then from one on the next GPU."""
    yield from _measure_owner(device, sizes, 0)
    if device.type != "cuda":
        return
    if torch.cuda.device_count() > 1:
        yield from _measure_owner(device, sizes, 1)
    else:
        yield Row("g", "between two GPUs", note="not run: there is one")


class _Owner:
    """The process that has the KV."""

    def __init__(self, process: BaseProcess, orders: Connection) -> None:
        self.process = process
        self._orders = orders
        if not orders.poll(BOUND_S):
            raise RuntimeError("the process that has the KV does not start")
        self._port = orders.recv()

    def lease(self, blocks: list[int]) -> Handoff:
        """Lease blocks of a prompt."""
        self._orders.send(tuple(blocks))
        place = ((HOST, self._port),)
        return Handoff("boot-p", self._orders.recv(), 1, "d", len(blocks), place, key=KEY)


@contextmanager
def _start_owner(device: torch.device, sizes: Sizes, gpu: int) -> Iterator[_Owner]:
    spawn = multiprocessing.get_context("spawn")
    orders, child_end = spawn.Pipe()
    own = "cuda:0" if device.type == "cuda" else "cpu"
    process = spawn.Process(target=own_kv, args=(child_end, own, sizes), daemon=True)
    shown = os.environ.get(VISIBLE)
    os.environ[VISIBLE] = shown.split(",")[gpu] if shown else str(gpu)
    try:
        process.start()
    finally:
        os.environ.pop(VISIBLE)
        if shown is not None:
            os.environ[VISIBLE] = shown
    child_end.close()
    try:
        yield _Owner(process, orders)
    finally:
        process.kill()
        process.join(BOUND_S)


def _measure_owner(device: torch.device, sizes: Sizes, gpu: int) -> Iterator[Row]:
    way = Transport.CUDA_IPC if device.type == "cuda" else Transport.SHARED_MEMORY
    name = f"{way}, {'next' if gpu else 'same'} {device.type}"
    select_copy_stream(device)
    ours = fill(sizes, device, 2)
    blocks = scatter_blocks(sizes)
    client = KvClient(build_kv("boot-d", ours, sizes), (way,), BOUND_S)
    with _start_owner(device, sizes, gpu) as owner, closing(client):

        def pull(count: int) -> float:
            handoff = owner.lease(blocks[:count])
            begun = time.perf_counter()
            client.pull(handoff, "d", 0, blocks[:count])
            return time.perf_counter() - begun

        try:
            yield Row("g", f"{name}: connect, map and pull one block", 1e3 * pull(1), "ms")
        except RefusedError as error:
            yield Row("g", name, note=f"does not work here: {error}")
            return
        for tokens in [each for each in PROMPTS if each <= sizes.tokens] or [sizes.tokens]:
            count = tokens * sizes.num_blocks // sizes.tokens
            seconds = statistics.median([pull(count) for _ in range(sizes.rounds + 1)][1:])
            rate = sizes.kv_bytes * count / sizes.num_blocks / seconds / 1e9
            note = f"{1e3 * seconds:.2f} ms, scattered"
            yield Row("g", f"{name}: pull {tokens:,} tokens", rate, "GB/s", note)
        pull(sizes.num_blocks)
        if not all(map(torch.equal, ours, fill(sizes, device, 1))):
            raise WrongBytesError(f"{name}: other bytes arrived than were sent")
        yield from _measure_death(name, device, owner, client, blocks)


def _measure_death(
    name: str, device: torch.device, owner: _Owner, client: KvClient, blocks: list[int]
) -> Iterator[Row]:
    """Kill the owner while its memory is mapped; its memory is free once the links are closed."""
    handoff = owner.lease(blocks)
    owner.process.kill()
    owner.process.join(BOUND_S)
    mapped = get_free_bytes(device)
    begun = time.perf_counter()
    client.close_lost()
    yield Row("g", f"{name}: unmap after a kill", 1e3 * (time.perf_counter() - begun), "ms")
    if mapped is not None:
        freed = ((get_free_bytes(device) or 0) - mapped) / 2**20
        note = "on this GPU; an owner on another one frees nothing here"
        yield Row("g", f"{name}: memory that this frees", freed, "MiB", note)
    begun = time.perf_counter()
    try:
        client.pull(handoff, "d", 0, blocks)
    except RefusedError as error:
        note = f"refused: {error.reason}"
        yield Row("g", f"{name}: next pull", 1e3 * (time.perf_counter() - begun), "ms", note)
    else:
        raise WrongBytesError(f"{name}: KV of a dead owner was accepted")
    # The context of this process has to be whole.
    torch.ones(8, device=device).sum().item()
