"""Measures how long an operator takes: CUDA events on a GPU, the process's clock on a CPU.

On a GPU, launching a kernel from Python takes longer than many kernels run, and engines replay
graphs in which a launch costs nothing. Weights that are read again at once come from the L2 cache,
which happens in no engine with more than one layer. So runs are captured in a graph, and operators
cycle through several copies of their inputs.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median, quantiles
from typing import Protocol, TypedDict

import torch

RunOperator = Callable[[int], object]
"""Runs an operator on one of its copies, by number."""

_WARM_UPS = 3
_MIN_REPEAT_S = 0.004
"""Shortest repeat on CPU, so that the overhead of clock and interpreter is negligible."""
_GRAPH_RUNS = 32


class OperatorDuration(TypedDict):
    """Duration of one run, as a `ProfilePoint` has it."""

    ms: float
    spread_ms: float
    """Distance between the 25th and the 75th percentile of the repeats."""
    repeats: int


class Clock(Protocol):
    """Times operators on one device."""

    @property
    def device(self) -> torch.device:
        """torch's device."""

    def measure(self, run: RunOperator, repeats: int) -> list[float]:
        """Return the milliseconds of one run, from `repeats` repeats."""


class CpuClock:
    """Measures with the process's clock."""

    device = torch.device("cpu")

    def measure(self, run: RunOperator, repeats: int) -> list[float]:
        """Measure repeats of some milliseconds each."""
        for index in range(_WARM_UPS):
            run(index)
        begin = time.perf_counter()
        run(0)
        runs = max(1, round(_MIN_REPEAT_S / max(time.perf_counter() - begin, 1e-7)))
        durations_ms = []
        for _ in range(repeats):
            begin = time.perf_counter()
            for index in range(runs):
                run(index)
            durations_ms.append((time.perf_counter() - begin) * 1e3 / runs)
        return durations_ms


class CudaClock:
    """Measures with events around a captured graph of runs."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)

    def measure(self, run: RunOperator, repeats: int) -> list[float]:
        """Measure repeats that replay the graph once each."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for index in range(_WARM_UPS):
                run(index)
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for index in range(_GRAPH_RUNS):
                run(index)
        graph.replay()
        durations_ms = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            durations_ms.append(begin.elapsed_time(end) / _GRAPH_RUNS)
        return durations_ms


def summarize(durations_ms: Sequence[float], weight: float = 1.0) -> OperatorDuration:
    """Return the median and the distance between the quartiles, times `weight`."""
    spread = 0.0
    if len(durations_ms) > 1:
        first, _, third = quantiles(durations_ms, n=4, method="inclusive")
        spread = third - first
    ms, spread_ms = round(median(durations_ms), 6) * weight, round(spread, 6) * weight
    return OperatorDuration(ms=ms, spread_ms=spread_ms, repeats=len(durations_ms))
