"""Cores apart for engines' passes, for their fronts, and for who asks, as beside a GPU.

`cleave up` gives an instance on CPU one core for everything: API server, scheduler and passes. A
pass then takes as long as the others leave it, which no profile of the idle engine shows, and
which is not so where passes run on a GPU. Here passes keep that core and all else moves away.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from urllib.parse import urlsplit

import psutil

_WORKER = "VLLM::Worker"
"""What vLLM calls its processes that compute passes."""


class CoresError(RuntimeError):
    """The engines' processes could not be distinguished."""


def part_fronts(engine_urls: Iterable[str], gateway_url: str) -> None:
    """Leave each engine's workers alone on a core; fronts, schedulers and who asks share others.

    Raises CoresError.
    """
    workers = []
    fronts = []
    for url in engine_urls:
        server = find_listener(url)
        for process in (server, *server.children(recursive=True)):
            (workers if process.name().startswith(_WORKER) else fronts).append(process)
    if not workers:
        raise CoresError("no engine has a worker process; is it vLLM on CPU?")
    cores = os.cpu_count() or 1
    used_cores = _pick_apart(len(workers), cores)
    rest = _away(used_cores, cores)
    if not rest:
        needed = len(workers) + 1
        raise CoresError(f"{len(workers)} engines need {needed} cores; or use --share-cores")
    for worker, core in zip(workers, used_cores, strict=True):
        _move(worker, [core])
        worker.nice(0)
    for process in (*fronts, find_listener(gateway_url), psutil.Process(os.getpid())):
        _move(process, rest)


def _pick_apart(num: int, cores: int) -> list[int]:
    """As many cores, no two of them neighbours while that can be.

    Virtual cores 2n and 2n+1 may be threads of one real core, which the machine does not say.
    """
    return [*range(0, cores, 2), *range(1, cores, 2)][:num]


def _away(used_cores: list[int], cores: int) -> list[int]:
    """Cores that are free, and no neighbours of `taken` while there are such."""
    free = [core for core in range(cores) if core not in used_cores]
    return [core for core in free if core ^ 1 not in used_cores] or free


def find_listener(url: str) -> psutil.Process:
    """The process that opened the socket: those that it forked have it, too."""
    listeners = {each.pid: each for each in psutil.process_iter() if _has_socket(each, url)}
    for process in listeners.values():
        if process.ppid() not in listeners:
            return process
    raise CoresError(f"no process listens at {url}")


def _has_socket(process: psutil.Process, url: str) -> bool:
    address = urlsplit(url)
    with suppress(psutil.Error):
        return any(
            each.status == psutil.CONN_LISTEN
            and each.laddr.port == address.port
            and each.laddr.ip in (address.hostname, "0.0.0.0")
            for each in process.net_connections("tcp4")
        )
    return False


def _move(process: psutil.Process, cores: list[int]) -> None:
    """All threads; those that it starts later follow."""
    for thread in process.threads():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(thread.id, cores)
