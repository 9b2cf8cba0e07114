"""Metrics of a gateway of several processes: any process returns the sum over all.

Used by the server and the handlers. Each process writes its counts to a file once a second and
before it responds to a scrape; its replacement continues from there. A process that is killed loses
the counts of its last second, but no count that was ever scraped: a counter that decreases looks to
Prometheus like a restart of the gateway.
"""

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import ProcessCollector
from prometheus_client.metrics_core import Metric

from cleave.gateway.metrics.gateway_metrics import BucketHistogram, GatewayCollector, GatewayMetrics
from cleave.gateway.shared_state import SharedGatewayState
from cleave.policy.reuse_times import ReuseTimes

_SAME_FOR_ALL = ("keys_stale", "whole_below_tokens", "ahead_from_tokens")
"""All processes read the same file and watch the same EndpointSlices."""
_UNSAVED = ("slo", "in_flight", "processes", "restarts", *_SAME_FOR_ALL)
_NOT_SUMMED = ("process_start_time_seconds", "process_max_fds")
"""Taken from the parent process."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

PlainValue = Any
"""Numbers, lists of them (a histogram's counts and sum), and dicts of these."""


class MultiprocessCollector:
    """Registered with prometheus_client instead of a Collector and a ProcessCollector."""

    def __init__(self, metrics: GatewayMetrics, shared_state: SharedGatewayState) -> None:
        self._metrics = metrics
        self._shared_state = shared_state

    def collect(self) -> Iterable[Metric]:
        """Called at each scrape."""
        shared_state = self._shared_state
        save_counters(self._metrics, shared_state)
        total = GatewayMetrics(self._metrics.slo)
        for process in range(shared_state.num_processes):
            restore_counters(total, shared_state.read_counters(process))
        pids = shared_state.list_pids()
        for name in _SAME_FOR_ALL:
            setattr(total, name, getattr(self._metrics, name))
        total.in_flight = shared_state.count_in_flight()
        total.processes, total.restarts = len(pids), shared_state.restarts
        yield from GatewayCollector(total).collect()
        yield from sum_process_metrics([os.getppid(), *pids])


def save_counters(metrics: GatewayMetrics, shared_state: SharedGatewayState) -> None:
    """Write the counts of this process to its file."""
    shared_state.write_counters(msgspec.msgpack.encode(_to_plain(metrics)))


def restore_counters(metrics: GatewayMetrics, saved: bytes) -> None:
    """Add saved counts."""
    if saved:
        _add_plain(metrics, msgspec.msgpack.decode(saved))


def sum_process_metrics(pids: list[int]) -> Iterable[Metric]:
    """CPU time, memory and files of a parent and its children; shared memory counts in each."""
    families: dict[str, Metric] = {}
    for pid in pids:
        for family in ProcessCollector(pid=partial(int, pid), registry=None).collect():
            total = families.setdefault(family.name, family)
            if total is not family and family.name not in _NOT_SUMMED:
                total.samples = [
                    sample._replace(value=sample.value + other.value)
                    for sample, other in zip(total.samples, family.samples, strict=True)
                ]
    cpu = families.get("process_cpu_seconds")
    if cpu is not None:
        ended_s = _read_ended_children_cpu_s(pids[0])
        cpu.samples = [sample._replace(value=sample.value + ended_s) for sample in cpu.samples]
    yield from families.values()


def _read_ended_children_cpu_s(parent: int) -> float:
    fields = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / _TICKS_PER_S


def _to_plain(counted: object) -> PlainValue:
    if isinstance(counted, int | float):
        return counted
    if isinstance(counted, BucketHistogram | ReuseTimes):
        return counted.to_list()
    if isinstance(counted, dict):
        return {key: _to_plain(value) for key, value in counted.items()}
    # Attributes of an object without methods; compiled objects have no `vars`.
    names = [name for name in dir(type(counted)) if not name.startswith("_")]
    return {name: _to_plain(getattr(counted, name)) for name in names if name not in _UNSAVED}


def _add_plain(counted: object, more: PlainValue) -> None:
    if isinstance(counted, BucketHistogram | ReuseTimes):
        counted.merge(more)
    elif isinstance(counted, dict):
        for key, value in more.items():
            if isinstance(value, int | float):
                counted[key] = counted.get(key, 0) + value
            else:
                _add_plain(counted[key], value)
    else:
        for name, value in more.items():
            if isinstance(value, int | float):
                setattr(counted, name, getattr(counted, name) + value)
            else:
                _add_plain(getattr(counted, name), value)
