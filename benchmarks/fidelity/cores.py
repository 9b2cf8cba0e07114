"""Cores apart for engines' passes, for their fronts, and for who asks, as beside a GPU.

`cleave up` gives an instance on CPU one core for everything: API server, scheduler and passes. A
pass then takes as long as the others leave it, which no profile of the idle engine can tell, and
which is not so where passes run on a GPU. Here passes keep that core and all else moves away.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from urllib.parse import urlsplit

import psutil


class CoresError(RuntimeError):
    """The engines' processes could not be told apart."""


def part_fronts(engine_urls: Iterable[str], gateway_url: str) -> None:
    """Leave each engine's workers alone on their core; fronts and schedulers share the next ones.

    The last core is for the gateway and for this process, which asks. Raises CoresError.
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
    taken = {core for worker in workers for core in worker.cpu_affinity()}
    *spare, last = sorted(set(range(psutil.cpu_count() or 1)) - taken)
    if not spare:
        raise CoresError(f"{len(taken)} engines need {len(taken) + 2} cores to be told apart")
    for process in fronts:
        _move(process, spare)
    for process in (_find_listener(gateway_url), psutil.Process(os.getpid())):
        _move(process, [last])
    for worker in workers:
        worker.nice(0)


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
