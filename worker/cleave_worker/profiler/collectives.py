"""All-reduce and send between the GPUs of one machine, or between processes on CPU.

Model-agnostic (Vidur, section 4.3): time depends on bytes and links. One process per GPU; the times
of rank 0 are used, with a barrier before each repeat.
"""

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.queues import SimpleQueue

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_TIMEOUT_S = 300.0
_WARM_UPS = 5
_RUNS = 20
"""Consecutive runs in one repeat."""


class CollectiveError(RuntimeError):
    """The group of GPUs could not be measured; one line with the reason."""


@dataclass(frozen=True, slots=True)
class CollectiveTask:
    """The measurement of a group of processes."""

    ranks: int
    sizes_bytes: tuple[int, ...]
    repeats: int
    on_gpu: bool
    port: int


Times = dict[int, list[float]]
"""Bytes to milliseconds of each repeat."""


def measure(ranks: int, sizes: Sequence[int], repeats: int, on_gpu: bool) -> tuple[Times, Times]:
    """Return (all-reduce over `ranks`, send from rank 0 to rank 1). Raises CollectiveError."""
    task = CollectiveTask(ranks, tuple(sizes), repeats, on_gpu, _free_port())
    results = mp.get_context("spawn").SimpleQueue()
    group = mp.spawn(_run_member, (task, results), nprocs=ranks, join=False)
    deadline = time.monotonic() + _TIMEOUT_S
    try:
        while not group.join(timeout=1.0):
            if time.monotonic() > deadline:
                raise CollectiveError(
                    f"{ranks} processes: not over in {_TIMEOUT_S:.0f} s; are the GPUs connected?"
                )
    except mp.ProcessRaisedException as error:
        raise CollectiveError(f"{ranks} processes: {str(error).strip().splitlines()[-1]}") from None
    finally:
        for process in group.processes:
            process.kill()
    times: tuple[Times, Times] = results.get()
    return times


def _run_member(rank: int, task: CollectiveTask, queue: "SimpleQueue[tuple[Times, Times]]") -> None:
    device = torch.device("cuda", rank) if task.on_gpu else torch.device("cpu")
    if task.on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if task.on_gpu else "gloo",
        init_method=f"tcp://127.0.0.1:{task.port}",
        rank=rank,
        world_size=task.ranks,
    )
    try:
        reduced, sent = Times(), Times()
        for size in task.sizes_bytes:
            tensor = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
            reduced[size] = _time_runs(task, partial(dist.all_reduce, tensor))
            sent[size] = _time_runs(task, partial(_send, rank, tensor))
        if rank == 0:
            queue.put((reduced, sent))
    finally:
        dist.destroy_process_group()


def _time_runs(task: CollectiveTask, run: Callable[[], object]) -> list[float]:
    for _ in range(_WARM_UPS):
        run()
    durations_ms = []
    for _ in range(task.repeats):
        dist.barrier()
        _wait(task)
        begin = time.perf_counter()
        for _ in range(_RUNS):
            run()
        _wait(task)
        durations_ms.append((time.perf_counter() - begin) * 1e3 / _RUNS)
    return durations_ms


def _send(rank: int, tensor: torch.Tensor) -> None:
    if rank == 0:
        dist.send(tensor, 1)
    elif rank == 1:
        dist.recv(tensor, 0)


def _wait(task: CollectiveTask) -> None:
    if task.on_gpu:
        torch.cuda.synchronize()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
