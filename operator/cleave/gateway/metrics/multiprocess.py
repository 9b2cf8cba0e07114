"""Metrics of a gateway of several processes: any process returns the sum over all.

Used by the context and the handlers. Each process writes its counts to a file once a second and
before it responds to a scrape; its replacement continues from there. A process that is killed loses
the counts of its last second, but no count that was ever scraped: a counter that decreases looks to
Prometheus like a restart of the gateway. What is hard: with thousands of models the counts are
megabytes, so they are written and read in time slices, in parts.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from cleave.gateway.metrics.gateway_metrics import BucketHistogram, GatewayMetrics
from cleave.gateway.shared_state import SharedGatewayState
from cleave.policy.reuse_times import ReuseTimes
from cleave.time_slices import Steps

_SAME_FOR_ALL = (
    "certificate_expiries", "keys_stale", "whole_below_tokens", "ahead_from_tokens",
)  # fmt: skip
"""All processes read the same files and watch the same EndpointSlices."""
_UNSAVED = ("slo", "itl_bounds_s", "in_flight", "processes", "restarts", *_SAME_FOR_ALL)
_BY_MODEL = ("models", "reuse_times")
"""Large values, of which each model is a part of its own."""

PlainValue = Any
"""Numbers, lists of them (a histogram's counts and sum), and dicts of these."""


def sum_counters(
    metrics: GatewayMetrics, shared_state: SharedGatewayState
) -> Steps[GatewayMetrics]:
    """The counts of all processes; this one's have just been saved."""
    total = GatewayMetrics(metrics.slo)
    for process in range(shared_state.num_processes):
        yield from restore_counters(total, shared_state, process)
    for name in _SAME_FOR_ALL:
        setattr(total, name, getattr(metrics, name))
    total.in_flight = shared_state.count_in_flight()
    total.processes, total.restarts = len(shared_state.list_pids()), shared_state.restarts
    return total


class CounterSaver:
    """Saves the counts of this process."""

    def __init__(self, metrics: GatewayMetrics, shared_state: SharedGatewayState) -> None:
        self._metrics = metrics
        self._shared_state = shared_state
        self._running: Steps[None] | None = None

    def save(self) -> Steps[None]:
        """Write what is counted now. A call that has not ended is ended first, so that older counts
        never replace newer ones."""
        if self._running is not None:
            yield from self._running
        self._running = self._shared_state.write_counters(_split(self._metrics))
        yield from self._running


def restore_counters(
    metrics: GatewayMetrics, shared_state: SharedGatewayState, process: int
) -> Steps[None]:
    """Add the counts that a process saved."""
    for part in shared_state.read_counters(process):
        _add_plain(metrics, msgspec.msgpack.decode(part))
        yield


def _split(metrics: GatewayMetrics) -> Iterator[bytes]:
    """The counts in parts, each of which can be added."""
    for name in _list_names(metrics):
        counted = getattr(metrics, name)
        if name in _BY_MODEL:
            for model, value in list(counted.items()):
                yield msgspec.msgpack.encode({name: {model: _to_plain(value)}})
        else:
            yield msgspec.msgpack.encode({name: _to_plain(counted)})


def _list_names(counted: object) -> list[str]:
    """Attributes of an object without methods; compiled objects have no `vars`."""
    names = [name for name in dir(type(counted)) if not name.startswith("_")]
    return [name for name in names if name not in _UNSAVED]


def _to_plain(counted: object) -> PlainValue:
    if isinstance(counted, int | float):
        return counted
    if isinstance(counted, BucketHistogram | ReuseTimes):
        return counted.to_list()
    if isinstance(counted, dict):
        return {key: _to_plain(value) for key, value in counted.items()}
    return {name: _to_plain(getattr(counted, name)) for name in _list_names(counted)}


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
