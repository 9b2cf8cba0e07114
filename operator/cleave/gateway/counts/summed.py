"""The metrics of a gateway of several processes: what all have counted, whoever is asked.

Used by the server and the pages. Each process leaves its counts in a file once a second, and before
it answers a scrape; its successor goes on from there. So a process that is killed takes along what
it has counted in its last second, but nothing that was ever told: counters that went back by one
would look to Prometheus like a restart of all.
"""

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import ProcessCollector
from prometheus_client.metrics_core import Metric

from cleave.gateway.counts.metrics import Collector, Histogram, Metrics
from cleave.gateway.siblings import Siblings

_NOT_COUNTED = ("slo", "in_flight", "processes", "restarts")
_NOT_SUMMED = ("process_start_time_seconds", "process_max_fds")
"""The parent's own."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

Plain = Any
"""Numbers, lists of them (a histogram's counts and sum), and dicts of these."""


class SummedCollector:
    """Registered with prometheus_client instead of a Collector and a ProcessCollector."""

    def __init__(self, metrics: Metrics, siblings: Siblings) -> None:
        self._metrics = metrics
        self._siblings = siblings

    def collect(self) -> Iterable[Metric]:
        """Called at each scrape."""
        siblings = self._siblings
        save(self._metrics, siblings)
        total = Metrics(self._metrics.slo)
        for process in range(siblings.count):
            restore(total, siblings.read_counts(process))
        pids = siblings.list_pids()
        total.in_flight = siblings.count_in_flight()
        total.processes, total.restarts = len(pids), siblings.restarts
        yield from Collector(total).collect()
        yield from sum_processes([os.getppid(), *pids])


def save(metrics: Metrics, siblings: Siblings) -> None:
    """Leave word of what this process has counted."""
    siblings.write_counts(msgspec.msgpack.encode(_to_plain(metrics)))


def restore(metrics: Metrics, saved: bytes) -> None:
    """Add what was saved."""
    if saved:
        _add(metrics, msgspec.msgpack.decode(saved))


def sum_processes(pids: list[int]) -> Iterable[Metric]:
    """CPU time, memory and files of a parent and its children; pages they share count in each."""
    families: dict[str, Metric] = {}
    for pid in pids:
        for family in ProcessCollector(pid=partial(int, pid), registry=None).collect():
            known = families.setdefault(family.name, family)
            if known is not family and family.name not in _NOT_SUMMED:
                known.samples = [
                    one._replace(value=one.value + other.value)
                    for one, other in zip(known.samples, family.samples, strict=True)
                ]
    cpu = families.get("process_cpu_seconds")
    if cpu is not None:
        ended_s = _read_ended_s(pids[0])
        cpu.samples = [one._replace(value=one.value + ended_s) for one in cpu.samples]
    yield from families.values()


def _read_ended_s(parent: int) -> float:
    """CPU time of children that have ended."""
    fields = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / _TICKS_PER_S


def _to_plain(counted: object) -> Plain:
    if isinstance(counted, int | float):
        return counted
    if isinstance(counted, Histogram):
        return counted.to_list()
    if isinstance(counted, dict):
        return {key: _to_plain(value) for key, value in counted.items()}
    return {
        name: _to_plain(getattr(counted, name))
        for name in _list_names(counted)
        if name not in _NOT_COUNTED
    }


def _add(counted: object, more: Plain) -> None:
    """Sum up in place."""
    if isinstance(counted, Histogram):
        counted.add(more)
    elif isinstance(counted, dict):
        for key, value in more.items():
            if isinstance(value, int | float):
                counted[key] = counted.get(key, 0) + value
            else:
                _add(counted[key], value)
    else:
        for name, value in more.items():
            if isinstance(value, int | float):
                setattr(counted, name, getattr(counted, name) + value)
            else:
                _add(getattr(counted, name), value)


def _list_names(counted: object) -> Iterable[str]:
    """What objects without methods hold; compiled ones cannot be looked through by `vars`."""
    return [name for name in dir(type(counted)) if not name.startswith("_")]
