"""simdistserve's bisection on Cleave's simulator: same requests, arrivals, steps and criterion.

Called by comparing.py to see whether both say the same goodput for each configuration of a grid.
"""

import random

import numpy as np
from matched_fleets import Case, to_fleet, to_trace
from other_planners import Config, Grid

from cleave.perf.published.distserve import FITS, KV_CAPACITY_TOKENS
from cleave.simulator.run import measure_latencies, prepare_fleet
from cleave.simulator.trace import Trace

_SEED = 0


def find_rate(grid: Grid, config: Config, dataset: Trace) -> float | None:
    """Requests per second and GPU; None: there are no coefficients or no memory figures."""
    case = _to_case(grid, config)
    if case is None:
        return None
    across, *sizes = config
    gpus = across * (sizes[0] * sizes[1] + sizes[2] * sizes[3])
    prepared = prepare_fleet(to_fleet(case))
    low, high = 0.0, grid.max_per_gpu_rate
    while high - low > grid.tolerance:
        middle = (low + high) / 2
        latencies = measure_latencies(
            prepared, to_trace(_draw(dataset, grid.num_requests, middle * gpus))
        )
        met = (
            np.quantile(values, percentile / 100) < target
            for values, target, percentile in zip(
                latencies[:2], grid.targets[:2], grid.targets[2:], strict=True
            )
        )
        low, high = (middle, high) if all(met) else (low, middle)
    return low


def _to_case(grid: Grid, config: Config) -> Case | None:
    across, prefill_tp, prefill_pp, decode_tp, decode_pp = config
    model = grid.model.removeprefix("facebook/")
    prefill, decode = (prefill_tp, across * prefill_pp), (decode_tp, across * decode_pp)
    for size in (prefill, decode):
        if f"distserve/{model}/tp{size[0]}" not in FITS or size not in KV_CAPACITY_TOKENS[model]:
            return None
    targets = float(grid.targets[0]), float(grid.targets[1])
    return Case("distserve", model, prefill, decode, 0.0, targets)


def _draw(dataset: Trace, num: int, rate: float) -> Trace:
    """What simdistserve draws from the data set with its only seed."""
    picked = random.Random(_SEED).sample(range(len(dataset)), num)
    gaps = np.random.RandomState(_SEED).gamma(1.0, 1.0 / rate, num - 1) * 1000
    return Trace(
        np.append(0.0, np.cumsum(gaps)),
        dataset.prompt_tokens[picked],
        dataset.output_tokens[picked],
    )
