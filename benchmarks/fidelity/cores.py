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


class CoresError(RuntimeError):
    """The engines' processes could not be distinguished."""


def part_fronts(engine_urls: Iterable[str], gateway_url: str) -> None:
    """Leave each engine's workers alone on a core; fronts, schedulers and who asks share others.

    Raises CoresError.
    """
    workers = []
    fronts = []
    for url in engine_urls:
        server = _find_listener(url)
        for scheduler in server.children():
            workers += scheduler.children()
        fronts += [server, *server.children()]
    if not workers:
        raise CoresError("no engine has a worker process; is it vLLM on CPU?")
    cores = os.cpu_count() or 1
    used_cores = _pick_apart(len(workers), cores)
    rest = _away(used_cores, cores)
    if not rest:
        raise CoresError(f"{len(workers)} engines need {len(workers) + 1} cores to be told apart")
    for worker, core in zip(workers, used_cores, strict=True):
        _move(worker, [core])
        worker.nice(0)
    for process in (*fronts, _find_listener(gateway_url), psutil.Process(os.getpid())):
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


def _find_listener(url: str) -> psutil.Process:
    address = urlsplit(url)
    for connection in psutil.net_connections("tcp4"):
        listens = connection.status == psutil.CONN_LISTEN and connection.pid
        here = connection.laddr.port == address.port
        if listens and here and connection.laddr.ip in (address.hostname, "0.0.0.0"):
            return psutil.Process(connection.pid)
    raise CoresError(f"nobody listens at {url}")


def _move(process: psutil.Process, cores: list[int]) -> None:
    """All threads; those that it starts later follow."""
    for thread in process.threads():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(thread.id, cores)
